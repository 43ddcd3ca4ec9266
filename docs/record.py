"""Records a real terminal as an SVG: a run is killed, resumed, and compared with an undisturbed run.

`make pictures` writes it to docs/images/killed-and-resumed.svg. tmux is the terminal. Each screen
that differs from the one before is stored once, and CSS plays the screens, without a script.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

COLUMNS, ROWS, SECONDS_A_LOOK = 90, 22, 0.25
SPEED, LONGEST = 8.0, 0.25  # the picture plays faster; the longest time of a screen in seconds
UNDISTURBED = "windlass train quickstart train.threads=2 run.dir=runs/whole"
COMMANDS = (
    "timeout --signal=KILL 15 windlass train quickstart train.threads=2 run.dir=runs/killed",
    "windlass train quickstart train.threads=2 run.dir=runs/killed  # the same command resumes",
    "cmp runs/{whole,killed}/checkpoints/step-00000480/rank-00000.safetensors && echo equal",
)
CHARACTER, LINE, MARGIN = 8.4, 18, 14  # pixels, for 14 px monospace
STYLE = "text{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#d5d9de;white-space:pre}"


def tmux(*words: str) -> str:
    return subprocess.run(
        ["tmux", "-L", "record", *words], check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def record() -> list[tuple[float, str]]:
    """Seconds since the beginning and the screen, with its colours as escape codes, at each change."""
    screens, began = [(0.0, "")], time.monotonic()

    def look() -> str:
        time.sleep(SECONDS_A_LOOK)
        screen = tmux("capture-pane", "-p", "-e", "-t", "0")
        if screen != screens[-1][1]:
            screens.append((time.monotonic() - began, screen))
        return re.sub(r"\x1b\[[0-9;]*m", "", screen).rstrip()

    with tempfile.TemporaryDirectory() as folder:
        path = f"PATH={Path(sys.executable).parent}:$PATH"
        subprocess.run([sys.executable, "-m", *UNDISTURBED.split()], cwd=folder, check=True)
        shell = (
            f"cd {folder}; export {path} PS1='$ ' TERM=xterm-256color; exec bash --norc --noprofile"
        )
        tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), shell)
        try:
            for command in COMMANDS:
                while not look().endswith("$"):
                    pass
                for start in range(0, len(command), 6):
                    tmux("send-keys", "-l", "-t", "0", "--", command[start : start + 6])
                    look()
                tmux("send-keys", "-t", "0", "Enter")
                look()
            while not look().endswith("$"):
                pass
        finally:
            tmux("kill-server")
    return screens


def spans(line: Text) -> str:
    """One line of the screen as SVG's `tspan`s."""
    parts, console = [], Console()
    for segment in line.render(console):
        text, style = html.escape(segment.text.rstrip("\n")), segment.style
        color = style.color.get_truecolor(SVG_EXPORT_THEME).hex if style and style.color else ""
        marks = (f' fill="{color}"' if color else "") + (
            ' font-weight="bold"' if style and style.bold else ""
        )
        marks += ' opacity="0.65"' if style and style.dim else ""
        parts.append(f"<tspan{marks}>{text}</tspan>" if marks else text)
    return "".join(parts)


def draw(screens: list[tuple[float, str]]) -> str:
    """The SVG: every different line stands once in `defs`, a screen is a group of references, shown
    for its time.
    """
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, ROWS * LINE + 2 * MARGIN
    ends = [at for at, _ in screens[1:]] + [screens[-1][0] + 4]
    times = [min((end - at) / SPEED, LONGEST) for (at, _), end in zip(screens, ends, strict=True)]
    times[-1] = 2.0
    total, lines, groups, began = sum(times), dict[str, str](), list[str](), 0.0
    for index, ((_, screen), seconds) in enumerate(zip(screens, times, strict=True)):
        uses = []
        for row, raw in enumerate(screen.rstrip().split("\n")):
            if text := spans(Text.from_ansi(raw.rstrip())).rstrip():
                name = lines.setdefault(text, f"l{len(lines)}")
                uses.append(f'<use href="#{name}" y="{MARGIN + LINE * (row + 1) - 5}"/>')
        first, last = 100 * began / total, 100 * (began + seconds) / total
        hidden = "" if index == 0 else f"0%,{first - 0.001:.3f}%{{visibility:hidden}}"
        after = "" if index == len(screens) - 1 else f"{last:.3f}%,100%{{visibility:hidden}}"
        at_rest = (
            "" if index == len(screens) - 1 else ' visibility="hidden"'
        )  # where nothing is animated: the last screen
        groups.append(
            f"<style>@keyframes k{index}{{{hidden}{first:.3f}%,{last - 0.001:.3f}%{{visibility:visible}}{after}}}"
            f'#s{index}{{animation:k{index} {total:.1f}s step-end infinite}}</style><g id="s{index}"{at_rest}>{"".join(uses)}</g>'
        )
        began += seconds
    defs = "".join(
        f'<text id="{name}" x="{MARGIN}" xml:space="preserve">{text}</text>'
        for text, name in lines.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="A run is killed, resumed, and equal to a run that was not"><style>{STYLE}</style><defs>{defs}</defs>'
        f'<rect width="100%" height="100%" rx="8" fill="#16191d"/>{"".join(groups)}</svg>\n'
    )
