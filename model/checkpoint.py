"""Checkpoints: a folder of ``config.json``, ``model.safetensors`` and a tokenizer's file.

Keys and shapes are checked strictly, and a digest over config, weights and
tokenizer names the model: a session's state means something only to the model
that made it. Folders of other projects load too, where `model.foreign` knows
the ``model_type`` of their config; their weights may be several files next to
an index. So do files that are a model without a folder: a native RWKV-7 file, ``NAME.pth`` or
``NAME.st``, with a tokenizer in the same folder or the published one, one of rwkv.cpp, and
``NAME.gguf``, which has a tokenizer of its own. A folder may also be an adapter over such a file
(`model.adapted`).

A chat template may lie next to them (`model.chat`); what a state means
does not depend on it, so the digest leaves it out.

Loading needs no torch; a checkpoint's `model` and saving import it.

A chat is served by a checkpoint's own template, its family's, or the plain one (`chat_of`).
``generation_config.json`` says how a model's makers would draw its tokens (`read_sampling`), as
transformers writes it. It holds where a request says nothing; with ``do_sample`` false it says
nothing either. Which tokens end a text stands there too: see `model.tokenization.base`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from model.architectures import ARCHITECTURES, config_from_dict
from model.architectures.config import Config, calibration_of, with_state_dtype
from model.chat import (
    ChatTemplate,
    checked_template,
    read_chat_template,
    save_chat_template,
)
from model.checkpoint_files import (
    ADAPTER,
    CONFIG,
    GGUF_SUFFIX,
    NO_LORA,
    Lora,
    config_file,
    is_readable,
    read_weights,
    weight_files,
)
from model.files import ConfigError, errors_in, open_file, read_json
from model.hub.base import BaseError, base_of, has_base, read_base
from model.hub.locate import locate
from model.tensor_spec import StateDType
from model.tokenization.base import GENERATION_CONFIG
from model.tokenization.world import NUM_BYTES, PADDED_SIZE, PUBLISHED, BytesCodec
from model.tokenizer import FILES as TOKENIZER_FILES
from model.tokenizer import Tokenizer, TokenizerError
from model.weights import WEIGHTS, CheckpointError, Weights, check_weights

if TYPE_CHECKING:
    import torch

    from model.architectures.network import Network
    from model.foreign import MultiTokenHead
    from model.weights.gguf_file import GgufFile

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "load_checkpoint",
    "locate",
    "save_chat",
    "save_checkpoint",
    "save_tokenizer",
]

#: Where a GGUF file has its chat template: text in Jinja's language, or the name of a known one.
GGUF_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model: ``weights`` by name as numpy arrays, floating point as float32.

    ``digest`` is SHA-256 in hex over the three files. ``chat_template`` is the
    checkpoint's own, its family's, or the plain one. ``tuned_state`` is a block of state that
    is merged into the weights' file, [num_bytes] uint8, for sessions to begin with.
    ``calibration`` names the text that int4 weights were rounded with, where there was one.
    ``sampling`` is how tokens are drawn where a request does not say: see `model.checkpoint`.
    ``head`` is the model's multi-token head, which only drafts.
    """

    config: Config
    weights: Weights
    tokenizer: Tokenizer
    digest: str
    chat_template: ChatTemplate = field(default_factory=ChatTemplate)
    tuned_state: npt.NDArray[np.uint8] | None = None
    calibration: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    head: MultiTokenHead | None = None

    @cached_property
    def model(self) -> Network:
        """The model on torch in float32, in evaluation mode, made when it is first asked for."""
        from model.architectures.network import model_of

        return model_of(self.config, self.weights)

    def with_state_dtype(self, dtype: StateDType) -> Checkpoint:
        """The same with the sums of a session's state stored in ``dtype``. Raises `ConfigError`."""
        if dtype == self.config.state_dtype:
            return self
        return replace(self, config=with_state_dtype(self.config, dtype))


def save_checkpoint(
    folder: Path,
    model: Network,
    tokenizer: Tokenizer,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the three files, the weights as ``dtype`` (default: as they are).

    Who may read them is up to the umask. Raises OSError.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    model.config.save(folder / CONFIG)
    save_tokenizer(folder, tokenizer)
    weights = {
        name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # `save_file` writes for its user alone


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes a checkpoint's tokenizer; where several tokens end a text, which ones as well."""
    tokenizer.save(folder / tokenizer.file_name)
    if len(tokenizer.eos_token_ids) > 1:
        values = {"eos_token_id": tokenizer.eos_token_ids}
        text = json.dumps(values, indent=2) + "\n"
        (folder / GENERATION_CONFIG).write_text(text, encoding="utf-8")


def save_chat(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint's chat template, where its family would not give it the same one."""
    template = checkpoint.chat_template
    if template != chat_of(checkpoint.config, checkpoint.tokenizer, None):
        save_chat_template(folder, template)


def load_checkpoint(
    source: str | Path,
    revision: str | None = None,
    tokenizer: Path | None = None,
    lora: Lora = NO_LORA,
) -> Checkpoint:
    """Loads a folder, a file, a bundled model by its name, or a hub id (see `locate`).

    ``tokenizer`` is the tokenizer's file. By default it is in the same folder, or inside a GGUF.
    ``lora`` names files of weight changes to merge. Raises `CheckpointError`, `ConfigError` or
    `TokenizerError`.
    """
    located = locate(source, revision)
    whole = located.is_file()
    config, weights = (located, located) if whole else (config_file(located), located / WEIGHTS)
    try:
        if has_base(located):
            found = _load_adapted(located, tokenizer)
        else:
            with errors_in(config, ConfigError), errors_in(weights, CheckpointError):
                found = _load(located, tokenizer)
        if not whole:
            with errors_in(located, ConfigError):
                found = replace(found, sampling=read_sampling(located))
        return _with_lora(found, lora) if lora.files else found
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror or error}") from error


def _with_lora(checkpoint: Checkpoint, lora: Lora) -> Checkpoint:
    """The model with the changes, which is another one.

    Of folders with a chat template, which the training used, the last one's is taken.
    """
    from model.foreign.lora import files_of, with_lora

    config, weights = with_lora(checkpoint.config, checkpoint.weights, lora)
    text = f"{checkpoint.digest} {_digest(files_of(lora))} {lora.alpha}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    changed = replace(checkpoint, config=config, weights=weights, digest=digest)
    for folder in filter(Path.is_dir, lora.files):
        with errors_in(folder, ConfigError):
            if (found := read_chat_template(folder)) is not None:
                template = chat_of(config, checkpoint.tokenizer, found)
                changed = replace(changed, chat_template=template)
    return changed


def _load(found: Path, tokenizer: Path | None) -> Checkpoint:
    if found.is_dir():
        return _load_folder(found, tokenizer or _next_to(found / CONFIG))
    load = _load_gguf if found.suffix == GGUF_SUFFIX else _load_file
    return load(found, tokenizer)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of what `locate` finds. Raises what `load_checkpoint` raises."""
    found = locate(source)
    if found.is_dir() and not has_base(found):
        return Tokenizer.load(_next_to(found / CONFIG))
    return load_checkpoint(found).tokenizer


def _next_to(path: Path) -> Path:
    """The tokenizer's file in the folder of ``path``. Raises `CheckpointError`."""
    if found := _find_next_to(path):
        return found
    names = " or ".join(TOKENIZER_FILES)
    raise CheckpointError(
        f"{path.parent} has no {names} for {path.name}; --tokenizer FILE names one elsewhere"
    )


def _find_next_to(path: Path) -> Path | None:
    files = (path.with_name(name) for name in TOKENIZER_FILES)
    return next((file for file in files if is_readable(file)), None)


def _load_file(path: Path, tokenizer_file: Path | None) -> Checkpoint:
    """A native RWKV file.

    One of the published size has the published vocabulary by default, and one of 256 ids bytes.
    """
    from model.families.rwkv7.read import merged_states, open_native, read_native
    from model.foreign.tuned_states import state_block

    file = open_native(path)
    config, weights = read_native(file, path.name)
    states = merged_states(file)
    tuned = state_block(states, path.name, config) if states else None
    usual = {PADDED_SIZE: PUBLISHED, NUM_BYTES: None}
    if tokenizer_file is None and config.vocab_size in usual:
        tokenizer_file = _find_next_to(path) or usual[config.vocab_size]
        tokenizer = Tokenizer.load(tokenizer_file) if tokenizer_file else Tokenizer(BytesCodec())
    else:
        tokenizer_file = tokenizer_file or _next_to(path)
        tokenizer = Tokenizer.load(tokenizer_file)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{tokenizer_file} has {tokenizer.vocab_size} ids, {path.name} {config.vocab_size}"
        )
    template = chat_of(config, tokenizer, read_chat_template(path.parent))
    digest = _digest([path, tokenizer_file] if tokenizer_file else [path])
    return Checkpoint(config, weights, tokenizer, digest, template, tuned)


def _load_gguf(path: Path, tokenizer_file: Path | None) -> Checkpoint:
    """A GGUF file; its own tokenizer where ``tokenizer_file`` is None and it has one."""
    from model import foreign
    from model.weights.gguf_file import GgufFile

    file = GgufFile(path)
    config, weights = foreign.read_gguf(file, path.name)
    tokenizer, tokenizer_file = _tokenizer_of(file, config, path, tokenizer_file)
    template = _template_of(file, config, tokenizer, path.parent)
    files = file.paths if tokenizer_file is None else [*file.paths, tokenizer_file]
    head = foreign.read_gguf_head(file, config)
    return Checkpoint(config, weights, tokenizer, _digest(files), template, head=head)


def _load_adapted(folder: Path, tokenizer_file: Path | None) -> Checkpoint:
    """An adapter over a GGUF file. Its digest has the base's hash, which was verified before."""
    from model.adapted import read_adapted

    try:
        base = base_of(folder)
    except BaseError as error:
        raise CheckpointError(error) from error
    with errors_in(folder / CONFIG, ConfigError), errors_in(folder / ADAPTER, CheckpointError):
        config, weights, file = read_adapted(folder, base)
        path = folder / base.name
        tokenizer, tokenizer_file = _tokenizer_of(file, config, path, tokenizer_file)
        template = _template_of(file, config, tokenizer, folder)
    files = [folder / CONFIG, folder / ADAPTER, *([tokenizer_file] if tokenizer_file else [])]
    digest = hashlib.sha256(f"{_digest(files)} {read_base(folder).sha256}".encode()).hexdigest()
    return Checkpoint(config, weights, tokenizer, digest, template)


def _tokenizer_of(
    file: GgufFile, config: Config, path: Path, tokenizer_file: Path | None
) -> tuple[Tokenizer, Path | None]:
    """The tokenizer in the GGUF file ``path``, or that in ``tokenizer_file``, or next to ``path``.

    Also which file it is in, where it is not in ``file``.
    """
    tokenizer = None if tokenizer_file else _inside(file, config, path)
    if tokenizer is None:
        tokenizer_file = tokenizer_file or _next_to(path)
        tokenizer = Tokenizer.load(tokenizer_file)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{tokenizer_file} has {tokenizer.vocab_size} ids, {path.name} {config.vocab_size}"
        )
    return tokenizer, tokenizer_file


def _template_of(
    file: GgufFile, config: Config, tokenizer: Tokenizer, folder: Path
) -> ChatTemplate:
    """The chat template in a GGUF file, or else in ``folder``, as its family has it."""
    inside = file.metadata.get(GGUF_TEMPLATE)
    if inside is None:
        return chat_of(config, tokenizer, read_chat_template(folder))
    source = checked_template(GGUF_TEMPLATE, inside)
    return chat_of(config, tokenizer, replace(plain_chat(config, tokenizer), source=source))


def _inside(file: GgufFile, config: Config, path: Path) -> Tokenizer | None:
    """The tokenizer in a GGUF file; None where the file has none."""
    from model.tokenization.gguf import read_gguf_codec

    try:
        codec = read_gguf_codec(file.metadata, file.arrays, config.vocab_size)
        return None if codec is None else Tokenizer(codec)
    except (TokenizerError, ConfigError) as error:
        raise TokenizerError(f"{path.name}: {error}; --tokenizer FILE gives another") from error


def _load_folder(folder: Path, tokenizer_file: Path) -> Checkpoint:
    tokenizer = Tokenizer.load(tokenizer_file)
    config, weights, calibration, head = _read(folder, tokenizer)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{tokenizer.file_name} has {tokenizer.vocab_size} ids,"
            f" vocab_size is {config.vocab_size}"
        )
    check_weights(config, weights)
    template = chat_of(config, tokenizer, read_chat_template(folder))
    files = [config_file(folder), *weight_files(folder), tokenizer_file]
    digest = _digest(files)
    return Checkpoint(
        *(config, weights, tokenizer, digest, template), calibration=calibration, head=head
    )


def _read(
    folder: Path, tokenizer: Tokenizer
) -> tuple[Config, Weights, str | None, MultiTokenHead | None]:
    """Config and weights, by our names for folders of any project, and what may be next to them.

    That is the calibration's text and a multi-token head.
    """
    from model import foreign  # most checkpoints are not

    values = foreign.read_config(folder)
    if not foreign.is_foreign(values.get("model_type")):
        return config_from_dict(values), read_weights(folder), calibration_of(values), None
    ids, tensors = (tokenizer.vocab_size, tokenizer.eos_token_id), read_weights(folder)
    config, weights = foreign.read(values, tensors, *ids)
    return config, weights, None, foreign.read_head(values, tensors, config)


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with open_file(path) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


#: From a checkpoint's tokenizer and its own template, if it has one, to a family's; None where
#: the family has not trained the checkpoint on turns.
FamilyChat = Callable[[Tokenizer, ChatTemplate | None], ChatTemplate | None]


def chat_of(config: Config, tokenizer: Tokenizer, found: ChatTemplate | None) -> ChatTemplate:
    """The template to serve, where ``found`` is that of the checkpoint's files."""
    if (place := ARCHITECTURES[config.model_type].chat) is not None:
        module, name = place
        family: FamilyChat = getattr(import_module(module), name)
        if (described := family(tokenizer, found)) is not None:
            return described
    return found or plain_chat(config, tokenizer)


def plain_chat(config: Config, tokenizer: Tokenizer) -> ChatTemplate:
    """The template for a checkpoint without one: texts begin with the model's start token."""
    starts = [n for id, n in tokenizer.special_names.items() if id == config.bos_token_id]
    return ChatTemplate(special_tokens={"bos_token": starts[0]} if starts else {})


#: The least and the largest value of each field that counts.
SAMPLING_RANGES = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (1e-9, 1.0),
    "top_n_sigma": (0.0, 100.0),
    "repetition_penalty": (0.01, 100.0),
}


def read_sampling(folder: Path) -> Mapping[str, float]:
    """The fields of `SAMPLING_RANGES` in the file of ``folder``, none where there is no file.

    Raises `ConfigError` for one that is not a number in its range.
    """
    path = folder / GENERATION_CONFIG
    if not os.path.lexists(path):
        return {}
    values = read_json(path)
    if values.get("do_sample") is False:
        return {}
    found: dict[str, float] = {}
    for name, (least, most) in SAMPLING_RANGES.items():
        value = values.get(name)
        if value is None:
            continue
        kinds = (int,) if isinstance(least, int) else (int, float)
        if type(value) not in kinds or not math.isfinite(value) or not least <= value <= most:
            raise ConfigError(
                f"{GENERATION_CONFIG}: {name} must be in {least:g}..{most:g}, not {value!r}"
            )
        found[name] = value if isinstance(least, int) else float(value)
    return found
