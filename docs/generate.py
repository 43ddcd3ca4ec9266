"""Fills the generated parts of the pages from the package.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; the rest of a page is written by
hand. `--check` fails if a part is stale.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from windlass import cli
from windlass.launch.job import Site
from windlass.launch.submit import Resources, submit_run
from windlass.recipe import Recipe, presets, settings, study_presets
from windlass.recipe.keys import other_tools, rows_of, values
from windlass.recipe.layers import first_sentence
from windlass.telemetry import measures

DOCS = Path(__file__).parent
PART = re.compile(r"<!-- generated: (.+?) -->\n.*?<!-- end -->\n", re.S)
MEASURES = {
    "TRAIN": measures.TRAIN,
    "EVAL": {name: m for name, m in measures.EVAL.items() if m.role != "place"},
    "SOURCE": measures.SOURCE,
    "DEVICE": measures.DEVICE,
    "PHASES": measures.PHASES,
    "RUN": measures.RUN,
    "SETUP": measures.SETUP,
}
UNITS = {"_ms": "ms", "_mb": "MB", "_pct": "%", "_hours": "h", "_s": "s"}
"""Units by the end of a name; a name that ends in `_per_s` is a rate."""


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    head, *lines = (f"| {' | '.join(row)} |\n" for row in rows)
    return f"{head}|{'---|' * len(rows[0])}\n{''.join(lines)}"


def preset_table() -> str:
    """Every preset of a recipe or a study, with its first sentence."""
    shipped = [(f"`{name}`", first_sentence(path)) for name, path in presets().items()]
    studies = [
        (f"`{name}`", f"Study. {first_sentence(path)}") for name, path in study_presets().items()
    ]
    return table(("preset", "what it is"), *shipped, *studies)


def setting_table(section: str) -> str:
    """The keys of a section of the recipe."""
    keys = {key: field for key, field in settings().items() if key.startswith(f"{section}.")}
    with_lists = {
        k: f for key, own in keys.items() for k, f in ({key: own} | rows_of({key: own})).items()
    }
    rows = [("key", "default", "values", "meaning")]
    for key, field in with_lists.items():
        default = "required" if field.is_required() else repr(field.default)
        if isinstance(field.default, bool):
            default = default.lower()
        takes = values(field).replace("|", "\\|")
        takes = "duration" if takes.startswith("steps (") else takes
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append((f"`{key}`", f"`{default.replace(chr(39), chr(34))}`", takes, meaning))
    return f'<div class="settings" markdown>\n\n{table(*rows)}\n</div>\n'  # see site.css


def commands() -> Any:
    """The command line with all its commands, as typer's click group."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(["--version"])
    return typer.main.get_command(cli.app)


def code(text: str) -> str:
    """Text as code in a cell of a table, where GitHub and the site read a bar differently."""
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def prose(text: str | None) -> str:
    """A help text as Markdown: options and settings are code, angle brackets are not tags."""
    text = " ".join((text or "").split()).replace("|", "&#124;").replace("<", "&lt;")
    if "windlass " not in text:
        text = re.sub(r"(?<![\w`-])--[a-z][a-z-]+(?: [A-Z]+\b)?", r"`\g<0>`", text)
        text = re.sub(r"(?<![\w`.])[a-z]+\.[a-z_.]+=[\w.+-]*\w", r"`\g<0>`", text)
    return text


def option_row(option: Any) -> tuple[str, str, str]:
    """An option, its default and its meaning."""
    default = option.default
    value = option.metavar or {int: "N", float: "X", type(None): "PATH"}.get(type(default), "TEXT")
    value = "" if option.is_flag else f" {value}"
    shown = default not in (None, False, "", 0, 0.0, -1) and not isinstance(default, (list, tuple))
    return code(", ".join(option.opts) + value), code(str(default)) * shown, prose(option.help)


def command_part(name: str, command: Any) -> str:
    """The usage, arguments, options and exit codes of a command."""
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["windlass", name, *command.collect_usage_pieces(context)])
    text = f"\n### {name}\n\n```text\n{usage}\n```\n"
    for paragraph in re.split(r"\n\s*\n", (command.help or "").strip()):
        example = paragraph.strip().removeprefix("Example: ")
        is_example = example != paragraph.strip()
        text += (
            f"\n```bash\n{example.strip('`')}\n```\n" if is_example else f"\n{prose(paragraph)}\n"
        )
    if arguments:
        rows = [(code(a.metavar), prose(a.help)) for a in arguments]
        text += "\n" + table(("argument", "meaning"), *rows)
    if options:
        text += "\n" + table(("option", "default", "meaning"), *map(option_row, options))
    if command.epilog:
        text += f"\n{command.epilog.strip()}\n"
    return text


def command_list() -> str:
    """Every command, by the groups of `windlass --help`."""
    app = commands()
    rows, text = [("group", "commands")], ""
    for heading, names in cli.VERBS.items():
        links = [f"[`{name}`](#{name})" for name in names]
        rows.append((heading, " · ".join(links)))
        text += f"\n## {heading}\n"
        text += "".join(command_part(name, app.commands[name]) for name in names)
    return table(*rows) + text


def measure_table(kind: str, *columns: str) -> str:
    """The numbers of a kind."""
    rows = [("name", *columns)]
    for m in MEASURES[kind].values():
        meaning = m.meaning or m.words or m.title
        units = [unit for end, unit in UNITS.items() if m.name.endswith(end)]
        rate = m.name.endswith("per_s")
        cells = {
            "meaning": meaning[0].upper() + meaning[1:],
            "unit": "fraction" if m.kind == "share" else m.unit or "".join(units * (not rate)),
            "terminal": f"`{re.sub('{.*?}', '…', m.console)}`" * bool(m.console),
            "trackers": f"`{m.tracker}/{m.name}`" * bool(m.tracker),
            "better": m.better,
            "read from": ", ".join(f"`{source}`" for source in m.source.split()),
        }
        rows.append((f"`{m.name}`", *(cells[column] for column in columns)))
    return table(*rows)


def key_table(tool: str) -> str:
    """Another tool's keys, and the settings that stand for them."""
    rows = [("there", "here", "remark")]
    for theirs, (ours, remark) in other_tools()[tool].items():
        note = remark.replace("|", "\\|")
        rows.append((f"`{theirs}`", f"`{ours}`" if ours else "-", note))
    return table(*rows)


def script(scheduler: str, page: str) -> str:
    """The batch script of a scheduler, with the site file and for the command of the page."""
    site = re.search(r"^# site.toml\n(.*?)^```", page, re.M | re.S)
    assert site, "the page has no site.toml"
    asked = Resources(nodes=2, gpus_per_node=4, time="04:00:00", min_busbw=5)
    _, text, _ = submit_run(
        Recipe.load("c4-30m", ["run.dir=/scratch/me/runs/first", 'telemetry.trackers=["wandb"]']),
        scheduler=scheduler,
        site=Site.model_validate(tomllib.loads(site[1])),
        asked=asked,
        dry_run=True,
    )
    text = text.replace(sys.executable, "/home/me/venv/bin/python")
    return f"```bash\n{text.replace(str(Path.cwd()), '/home/me/project')}```\n"


def site_table() -> str:
    """The keys of the site file."""
    rows = [("key", "default", "meaning")]
    for key, field in Site.model_fields.items():
        default = repr(field.get_default(call_default_factory=True)).replace("'", '"')
        rows.append((f"`{key}`", f"`{default}`", prose(field.description)))
    return table(*rows)


def plan(page: str) -> str:
    """The first plan of the page: the command as it stands there, and what it prints."""
    command = re.search(r"^\$ (windlass plan .*)$", page, re.M)
    assert command, "the page has no plan"
    shown = subprocess.run(
        [sys.executable, "-m", *shlex.split(command[1])],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        cwd=DOCS,  # where no data is prepared
        env=os.environ | {"COLUMNS": "80"},
    ).stdout
    return f"```console\n$ {command[1]}\n{shown.rstrip()}\n```\n"


def part(name: str, page: str) -> str:
    """The text of a generated part; `page` is the whole page."""
    match name.split(maxsplit=1):
        case ["presets"]:
            return preset_table()
        case ["settings", section]:
            return setting_table(section)
        case ["commands"]:
            return command_list()
        case ["measures", words]:
            kind, columns = words.split(": ")
            return measure_table(kind, *columns.split(", "))
        case ["keys", tool]:
            return key_table(tool)
        case ["script", scheduler]:
            return script(scheduler, page)
        case ["site"]:
            return site_table()
        case ["plan"]:
            return plan(page)
    sys.exit(f"docs/generate.py generates no part {name!r}")


def stale_pages() -> Iterator[tuple[Path, str]]:
    """The pages whose generated parts differ from the package, with their new text."""
    missing = {f"settings {key.partition('.')[0]}" for key in settings() if "." in key}
    for path in sorted(DOCS.rglob("*.md")):
        old = path.read_text(encoding="utf-8")
        missing -= {match[1] for match in PART.finditer(old)}
        new = PART.sub(
            lambda match, page=old: (  # type: ignore[misc]
                f"<!-- generated: {match[1]} -->\n\n{part(match[1], page)}\n<!-- end -->\n"
            ),
            old,
        )
        if new != old:
            yield path, new
    if missing:
        sys.exit(f"reference/recipe.md has no part {', '.join(sorted(missing))}")


def main() -> int:
    """Write the pages, or compare them."""
    stale = list(stale_pages())
    for path, text in stale:
        if "--check" in sys.argv:
            print(f"{path.name} is not what the package says: run `python docs/generate.py`")
        else:
            path.write_text(text, encoding="utf-8")
    return bool(stale) and "--check" in sys.argv


if __name__ == "__main__":
    sys.exit(main())
