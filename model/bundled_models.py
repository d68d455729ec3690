"""The models that come with the package, by name: each is a folder of ``model/bundled``.

Wherever a model is named, by a flag, an argument or a configuration file, one of
these names will do (`model.hub.locate`). A folder of that name in the
working directory is taken instead, as it is for a name on the hub.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "bundled"
#: What is served where no model is named.
DEFAULT_NAME = "everstream-stories"
DEFAULT_MODEL = FOLDER / DEFAULT_NAME


def bundled_models() -> dict[str, Path]:
    """The folders by name, the default first, then by the alphabet."""
    names = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
    names.sort(key=lambda name: name != DEFAULT_NAME)
    return {name: FOLDER / name for name in names}
