"""The command: ``python -m benchmarks.studies.mechanisms ablation|speed|report``.

Each run leaves a JSON file in ``--runs``. ``ablation`` runs the plan of `plan.py` here and skips
what is there, so that the same command continues after an interruption. ``speed`` measures all its
mechanisms together and replaces their earlier figures. ``report`` gathers all files in one, and
draws.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.machine import machine
from benchmarks.report import write_result
from benchmarks.studies.mechanisms import language, plan, speed
from benchmarks.studies.mechanisms.ablation import listed, named, run_jobs
from benchmarks.studies.mechanisms.folder import Folder, RunError, origin, read_results
from benchmarks.studies.mechanisms.gather import competitors, plot, seed_deviation
from benchmarks.studies.mechanisms.specs import SIZES, Spec, all_specs
from model.config import ConfigError
from model.memory import keep_freed_memory


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.mechanisms",
        description=(__doc__ or "").partition("\n")[0],
    )
    commands = parser.add_subparsers(dest="command", required=True)

    speeds = _command(commands, "speed", "measure training and decoding speed, on an idle machine")
    speeds.add_argument(
        "mechanisms", nargs="*", help="mechanisms such as elu or elu:rotary=after; default: all"
    )
    _texts(speeds)
    speeds.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    speeds.add_argument("--rounds", type=int, default=speed.SpeedRecipe.rounds)
    speeds.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="type of decoding; default: the server's"
    )

    reports = _command(commands, "report", "write one file of results, and a plot, of all runs")
    reports.add_argument("--output", type=Path, help="file to write all results to")
    reports.add_argument("--plot", type=Path, help="folder for the plot")

    ablation = _command(commands, "ablation", "run what the ablation lacks, most telling first")
    _texts(ablation)
    ablation.add_argument("--valid", type=Path, required=True)
    ablation.add_argument("--out-of-domain", type=Path, required=True)
    ablation.add_argument(
        "--questions", nargs="+", choices=plan.QUESTIONS, default=list(plan.QUESTIONS)
    )
    ablation.add_argument("--names", nargs="+", help="only these of the runs, in this order")
    ablation.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    ablation.add_argument("--jobs", type=int, default=1, help="runs side by side")
    ablation.add_argument("--steps", type=int, default=language.Recipe.num_steps)
    ablation.add_argument("--warmup-steps", type=int, default=language.Recipe.warmup_steps)
    ablation.add_argument("--batch-size", type=int, default=language.Recipe.batch_size)
    ablation.add_argument("--list", action="store_true", help="show the runs, and run none")
    return parser.parse_args(words)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("--runs", type=Path, required=True, help="folder of the comparison")
    command.add_argument("--threads", type=int, default=1)
    return command


def _texts(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data", type=Path, action="append", required=True, help="text; repeat for several"
    )


def main() -> None:
    """Runs a command. Exit status: 1 if a run has no result, 2 if the command is invalid."""
    options = arguments()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    folder = Folder(options.runs)
    try:
        if options.command == "report":
            run_report(folder, options)
            return
        if options.command == "ablation":
            run_ablation(folder, options)
            return
        run_speed(folder, [Spec.parse(text) for text in options.mechanisms] or all_specs(), options)
    except (ConfigError, RunError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def run_speed(folder: Folder, specs: list[Spec], options: argparse.Namespace) -> None:
    """All together, in turn; earlier figures of the same mechanisms are replaced."""
    on = machine()
    recipe = language.Recipe(tuple(options.data), Path(), Path())
    dtype = options.dtype or ("bfloat16" if language.native_bfloat16("cpu") else "float32")
    wanted = speed.SpeedRecipe(dtype=dtype, rounds=options.rounds)
    for size in options.sizes:
        for spec, figures in speed.measure(folder, size, specs, recipe, wanted).items():
            folder.write(f"speed-{size}-{spec.slug}", {**origin(on), **figures})


def run_ablation(folder: Folder, options: argparse.Namespace) -> None:
    """What has no result yet. Raises `RunError` where a run has failed."""
    recipe = language.Recipe(
        tuple(options.data),
        options.valid,
        options.out_of_domain,
        num_steps=options.steps,
        warmup_steps=options.warmup_steps,
        batch_size=options.batch_size,
        device=options.device,
        precision="float32",
    )
    jobs = [job for job in plan.jobs(folder, recipe) if job.question in options.questions]
    if options.names:
        jobs = named(jobs, options.names)
    if options.list:
        print(listed(folder, jobs))
        return
    folder.prepare(options.data)
    if failed := run_jobs(folder, jobs, workers=options.jobs):
        raise RunError(f"no result of {', '.join(failed)}")


def run_report(folder: Folder, options: argparse.Namespace) -> None:
    """All runs in one file, and the plot."""
    runs = read_results(folder.path)
    if options.output:
        rows = [entry.values() for entry in competitors(runs)]
        seeds = {
            "rows_with_several": sum(len(row) > 1 for row in rows),
            "standard_deviation": seed_deviation(rows),
        }
        write_result(options.output, {"seeds": seeds, "runs": runs})
    if options.plot:
        plot(competitors(runs), options.plot)


if __name__ == "__main__":
    main()
