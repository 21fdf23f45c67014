"""`hone config check PATH`: find what is wrong with a repository before a server does."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hone.errors import NotFound


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "config", help="check the configuration of a repository's models", description=__doc__
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check",
        help="tell bad fields with their lines, and what was probably meant",
        description="Check a repository, a model's folder or a config.pbtxt: fields, values, files, and whether they"
        " fit the model's graph. Each finding is FILE:LINE:COLUMN: SEVERITY: FIELD: what is wrong. Exit code 1 for"
        " errors.",
    )
    check.add_argument("path", type=Path, help="a repository, a model's folder, or a config.pbtxt")
    check.add_argument("--model-config-name", default="", help="check configs/NAME.pbtxt of the models that have it")
    check.add_argument(
        "--gpus",
        type=_count,
        metavar="N",
        help="NVIDIA GPUs of the machine that the repository is meant for (default: those of this machine)",
    )
    check.add_argument("--no-graph", action="store_true", help="load no model: check without its graph, which is quick")
    check.add_argument("--strict", action="store_true", help="exit code 1 for warnings too")
    check.add_argument("--json", action="store_true", help="print as JSON")
    check.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from hone.cli.lint import lint, models_of
    from hone.cli.terminal import open_console, state

    if not arguments.path.exists():
        raise NotFound(f"there is no {arguments.path}: expected a repository, a model's folder or a config.pbtxt")
    folders = models_of(arguments.path)
    if not folders:
        raise NotFound(f"{arguments.path} holds no model: expected folders such as NAME/1/model.onnx in it")
    num_gpus, machine = _machine(arguments.gpus)
    findings = [
        one
        for folder in folders
        for one in lint(
            folder,
            arguments.model_config_name,
            graph=not arguments.no_graph,
            num_gpus=num_gpus,
            machine=machine,
        )
    ]
    counts = Counter(one.severity for one in findings)
    if arguments.json:
        print(
            json.dumps(
                {
                    "path": str(arguments.path),
                    "num_models": len(folders),
                    "num_gpus": num_gpus,
                    "num_errors": counts["error"],
                    "num_warnings": counts["warning"],
                    "findings": [asdict(one) for one in findings],
                }
            )
        )
    else:
        console = open_console()
        for one in findings:
            before, _, after = one.text.partition(f" {one.severity}: ")
            console.print(before, state(one.severity), end="", soft_wrap=True, markup=False)
            console.print(f": {after}", soft_wrap=True, markup=False)
        console.print(f"{len(folders)} model(s): {counts['error']} error(s), {counts['warning']} warning(s)")
    return 1 if counts["error"] or (arguments.strict and findings) else 0


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, found {number}")
    return number


def _machine(num_gpus: int | None) -> tuple[int, str]:
    """How many GPUs the models may ask for, and what findings call the machine that has them."""
    if num_gpus is not None:
        return num_gpus, f"the machine that this is checked for (--gpus {num_gpus})"
    from hone.tuning.gpus import detect_gpus

    return len(detect_gpus()), "this machine (--gpus N checks for another)"
