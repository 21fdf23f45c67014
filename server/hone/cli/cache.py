"""`hone cache`: look into the kernels cache, check it, clean it, carry it to other machines."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.cli.settings import read_settings
from hone.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from hone.kernels import Entry, KernelsCache, Listed, Miss, VerifyReport

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "cache", help="inspect, check, clean, export or import the kernels cache", description=__doc__
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    listed = add_action(actions, "ls", _list, "list entries, the most recently used first", run)
    listed.add_argument("--kind", choices=("kernels", "decisions", "artifacts", "constants"), help="only these")

    show = add_action(actions, "show", _show, "print an entry's manifest, its device and what is held against it", run)
    show.add_argument("digest", help="the entry's digest, or its beginning")

    add_action(actions, "quarantine", _quarantined, "list artifacts that may not serve, and why; and suspects", run)

    pardon = add_action(
        actions, "pardon", _pardon, "forget what is held against an artifact, so that it is tried again", run
    )
    pardon.add_argument("digest", help="the artifact's digest, or its beginning")

    verify = add_action(actions, "verify", _verify, "hash every file; exit code 1 if an entry is not sound", run)
    verify.add_argument("--remove", action="store_true", help="remove entries that are corrupt or incomplete")

    clean = add_action(
        actions, "gc", _collect, "remove unusable entries, what dead processes left, and the least used", run
    )
    clean.add_argument(
        "--max-size", type=parse_size, metavar="SIZE", help="bytes that may stay, such as 500M or 2GiB (default: all)"
    )

    export = add_action(actions, "export", _export, "write all sound entries into a tar file", run)
    export.add_argument("file", type=Path)

    taken = add_action(actions, "import", _import, "take decisions over from an export", run)
    taken.add_argument("file", type=Path)
    taken.add_argument(
        "--trust-binaries",
        action="store_true",
        help="take kernels, artifacts and constants too; they are run as code with the server's rights",
    )


def parse_size(text: str) -> int:
    """Bytes, from a number with an optional K, M, G or T (powers of 1024), as in 500M or 2GiB."""
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not parsed:
        raise argparse.ArgumentTypeError(f"'{text}' is no size, expected a number of bytes such as 500M or 2GiB")
    return int(float(parsed[1]) * (1 << _UNITS[parsed[2].upper()]))


def run(arguments: argparse.Namespace) -> int:
    from hone.kernels import KernelsCache

    root = read_settings(arguments, os.environ).kernels_cache
    cache = KernelsCache(root, create=arguments.action == "import")
    if not cache.exists:
        raise NotFound(f"no kernels cache in {root}: there is no {cache.path}; name another with --kernels-cache")
    return int(arguments.act(cache, arguments))


def add_action(actions: Any, name: str, act: Any, text: str, run: Any) -> argparse.ArgumentParser:
    """A command of those that work on a kernels cache: `run` opens it and calls `act`."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
    parser.add_argument(
        "--kernels-cache", default=argparse.SUPPRESS, metavar="DIR", help="folder of the cache (default: kernels_cache)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the server's settings")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, act=act)
    return parser


def _list(cache: KernelsCache, arguments: argparse.Namespace) -> int:
    entries = [entry for entry in cache.entries() if arguments.kind in (None, entry.name.kind)]
    entries.sort(key=lambda entry: (-entry.used_ns, entry.name))
    devices = cache.devices()
    total = sum(entry.size_bytes for entry in entries)
    if arguments.json:
        _print_json(
            {
                "path": str(cache.path),
                "devices": {scope: device.name if device else None for scope, device in devices.items()},
                "size_bytes": total,
                "entries": [_listed(entry) for entry in entries],
            }
        )
        return 0
    for scope, device in devices.items():
        print(f"device {scope[:12]}  {device.name if device else 'unknown'}")
    if entries:
        print(f"{'KIND':<10} {'SCOPE':<30} {'DIGEST':<16} {'SIZE':>10}  LAST USE")
    for entry in entries:
        scope = entry.name.scope if entry.name.kind == "kernels" else entry.name.scope[:12]
        size = format_size(entry.size_bytes)
        print(f"{entry.name.kind:<10} {scope:<30} {entry.name.digest[:16]} {size:>10}  {_time(entry.used_ns)}")
    print(f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {format_size(total)} in {cache.path}")
    return 0


def _show(cache: KernelsCache, arguments: argparse.Namespace) -> int:
    from hone.kernels import Entry

    entries = _find(cache, arguments.digest)
    devices = cache.devices()
    shown, sound = [], True
    for listed in entries:
        found = cache.peek(listed.name)
        sound = sound and isinstance(found, Entry)
        device = devices.get(listed.name.scope)
        shown.append(
            {
                **_listed(listed),
                "path": str(listed.path),
                "device": {"name": device.name, "fields": device.fields} if device else None,
                **_described(found),
                "quarantine": _quarantine(cache, listed),
            }
        )
    if arguments.json:
        _print_json(shown)
    else:
        for item in shown:
            for field, value in item.items():
                if value is not None:
                    text = value if isinstance(value, str) else json.dumps(value, indent=2)
                    print(f"{field + ':':<12} {text.replace(chr(10), chr(10) + ' ' * 13)}")
            print()
    return 0 if sound else 1


def _quarantined(cache: KernelsCache, arguments: argparse.Namespace) -> int:
    records = [record for scope in cache.devices() for record in cache.quarantine_records(scope)]
    if arguments.json:
        _print_json([dataclasses.asdict(record) for record in records])
        return 0
    for record in records:
        strikes = ", ".join(f"{count} x {cause}" for cause, count in sorted(record.strikes.items()))
        print(f"{record.digest[:16]}  device {record.scope[:12]}  {record.reason or f'suspected: {strikes}'}")
    print(f"{sum(record.reason is not None for record in records)} kept out, of {len(records)} with a record")
    return 0


def _pardon(cache: KernelsCache, arguments: argparse.Namespace) -> int:
    _check_digest(arguments.digest)
    records = [record for scope in cache.devices() for record in cache.quarantine_records(scope)]
    found = [record for record in records if record.digest.startswith(arguments.digest)]
    if not found:
        raise NotFound(f"nothing is held against an artifact whose digest begins with '{arguments.digest}'")
    if len({record.digest for record in found}) > 1:
        raise InvalidRequest(f"'{arguments.digest}' is the beginning of {len(found)} digests: give more of it")
    for record in found:
        cache.pardon(record.digest, record.scope)
    if arguments.json:
        _print_json([{"digest": one.digest, "device": one.scope, "was": one.reason} for one in found])
    else:
        for one in found:
            print(f"pardoned {one.digest} on device {one.scope[:12]}; 'retune' or a restart tries it again")
    return 0


def _verify(cache: KernelsCache, arguments: argparse.Namespace) -> int:
    report = cache.verify(remove=arguments.remove)
    if arguments.json:
        _print_json({**_checked(report), "num_removed": report.num_removed})
    else:
        _print_problems(report)
        removed = f", {report.num_removed} of them removed" if arguments.remove else ""
        print(f"{report.num_sound} sound, {len(report.problems)} not{removed}")
    return 1 if len(report.problems) > report.num_removed else 0


def _collect(cache: KernelsCache, arguments: argparse.Namespace) -> int:
    checked = cache.verify(remove=True)
    report = cache.evict(arguments.max_size)
    over = arguments.max_size is not None and report.size_bytes > arguments.max_size
    if arguments.json:
        _print_json({"num_removed": checked.num_removed, **dataclasses.asdict(report)})
    else:
        print(
            f"removed {checked.num_removed} unusable and {report.num_evicted} least recently used entries"
            f" ({format_size(report.freed_bytes)}), {report.num_swept} leftovers;"
            f" {report.num_entries} entries stay, {format_size(report.size_bytes)}"
        )
        if over:
            print(f"{report.num_held} entries are in use by running processes, so the cache stays over its size")
    return 0


def _export(cache: KernelsCache, arguments: argparse.Namespace) -> int:
    report = cache.export(arguments.file)
    size = arguments.file.stat().st_size
    if arguments.json:
        _print_json({"file": str(arguments.file), "size_bytes": size, "num_exported": report.num_sound, **_bad(report)})
    else:
        _print_problems(report)
        print(f"{report.num_sound} entries, {format_size(size)} in {arguments.file}")
    return 0


def _import(cache: KernelsCache, arguments: argparse.Namespace) -> int:
    report = cache.import_(arguments.file, trust_binaries=arguments.trust_binaries)
    if arguments.json:
        _print_json(
            {
                "num_imported": report.num_imported,
                "num_present": report.num_present,
                "num_untrusted": report.num_untrusted,
                "failures": [
                    {**name._asdict(), "reason": failure.reason, "detail": failure.detail}
                    for name, failure in report.failures
                ],
            }
        )
    else:
        for name, failure in report.failures:
            print(f"{name}: {failure.reason} {failure.detail}")
        print(f"imported {_counted(report.num_imported)}; {report.num_present} were there already")
        if report.num_untrusted:
            print(f"left out {_counted(report.num_untrusted)}: give --trust-binaries if you trust who made the file")
    return 1 if report.failures else 0


def _find(cache: KernelsCache, digest: str) -> list[Listed]:
    """Entries whose digest begins so: several only if all have the same digest. Raises NotFound, InvalidRequest."""
    _check_digest(digest)
    found = [entry for entry in cache.entries() if entry.name.digest.startswith(digest)]
    if not found:
        raise NotFound(f"no entry in {cache.path} has a digest that begins with '{digest}'")
    digests = sorted({entry.name.digest for entry in found})
    if len(digests) > 1:
        raise InvalidRequest(f"'{digest}' is the beginning of {len(digests)} digests: {', '.join(digests[:8])}")
    return sorted(found)


def _check_digest(digest: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{4,64}", digest):
        raise InvalidRequest(f"'{digest}' is no digest: expected at least 4 hexadecimal digits")


def _listed(entry: Listed) -> dict[str, Any]:
    return {**entry.name._asdict(), "size_bytes": entry.size_bytes, "last_use": _time(entry.used_ns)}


def _described(found: Entry | Miss) -> dict[str, Any]:
    from hone.kernels import Miss

    if isinstance(found, Miss):
        return {"problem": f"{found.reason.value}: {found.detail}"}
    files = {name: path.stat().st_size for name, path in found.files.items()}
    return {"created": found.created, "proven": found.proven, "files": files, "manifest": dict(found.manifest)}


def _quarantine(cache: KernelsCache, entry: Listed) -> dict[str, Any] | None:
    if entry.name.kind != "artifacts":
        return None
    record = cache.quarantine_record(entry.name.digest, entry.name.scope)
    if not record.history and record.reason is None:
        return None
    return {"reason": record.reason, "strikes": record.strikes, "history": list(record.history)}


def _checked(report: VerifyReport) -> dict[str, Any]:
    return {"num_sound": report.num_sound, **_bad(report)}


def _bad(report: VerifyReport) -> dict[str, Any]:
    problems = [
        {**name._asdict(), "reason": miss.reason.value, "detail": miss.detail} for name, miss in report.problems
    ]
    return {"problems": problems}


def _print_problems(report: VerifyReport) -> None:
    for name, miss in report.problems:
        print(f"{miss.reason.value:<10} {name}: {miss.detail}")


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing"


def format_size(size: int) -> str:
    """Such as "17 B", "1.5 MiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _time(used_ns: int) -> str:
    """A stamp as UTC; stamps come from a clock that may have jumped, so they may lie in the future."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(used_ns // 1_000_000_000)) if used_ns else "unknown"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
