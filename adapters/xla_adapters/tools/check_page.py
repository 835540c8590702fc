"""`page`: a check's report as one HTML file, without scripts and without anything from elsewhere."""

from __future__ import annotations

from html import escape

from xla_adapters.tools.check_findings import Finding
from xla_adapters.tools.check_report import CheckReport

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #f6f8fa; --bad: #b42318; --good: #116329; --quiet: #59636e }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --soft: #161b22; --bad: #ff7b72; --good: #56d364; --quiet: #9198a1 }
  body { background: #0d1117; color: #e6edf3 }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2rem }
.verdict { font-size: 1.1rem; font-weight: 600 } .bad { color: var(--bad) } .good { color: var(--good) }
.finding { border: 1px solid var(--line); border-left: 4px solid var(--line); border-radius: 6px; margin: 1rem 0;
  padding: .6rem 1rem } .finding.problem { border-left-color: var(--bad) }
.finding h3 { font-size: 1rem; margin: 0 0 .4rem } .kind { color: var(--quiet); font-weight: 400 }
.where, pre, code { font-family: ui-monospace, monospace; font-size: .85rem }
.where { color: var(--quiet); overflow-wrap: anywhere }
pre { background: var(--soft); border-radius: 6px; overflow-x: auto; padding: .6rem; margin: .4rem 0 }
.minus { color: var(--bad) } .plus { color: var(--good) }
p { margin: .4rem 0 } li { overflow-wrap: anywhere }
"""


def page(report: CheckReport) -> str:
    """The report as the text of an HTML file."""
    verdict, kind = _verdict(report)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>check of {escape(report.command)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f"<h1>xla-adapters check {escape(report.command)}</h1>",
        f'<p class="verdict {kind}">{escape(verdict)}</p>',
        f"<p>{report.facts.done} training steps in {report.facts.seconds:.0f} s, on CPU devices.</p>",
        f"<pre>{escape(report.summary())}</pre>" if report.summary() else "",
    ]
    for title, wanted in (("To change", True), ("To know", False)):
        chosen = [finding for finding in report.findings if finding.is_problem == wanted]
        if chosen:
            parts += [f"<h2>{title}</h2>", *map(_finding, chosen)]
    for title, notes in report.notes().items():
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        parts.append(f"<h2>{escape(title.capitalize())}</h2><ul>{items}</ul>")
    if report.failure and report.output:
        parts.append(f"<h2>What the script printed last</h2><pre>{escape(report.output)}</pre>")
    return "\n".join([*filter(None, parts), "</body></html>\n"])


def _verdict(report: CheckReport) -> tuple[str, str]:
    if report.failure:
        return f"Not checked: {report.failure}", "bad"
    if report.problems:
        return f"{report.problems} to change", "bad"
    return "Nothing to change", "good"


def _finding(finding: Finding) -> str:
    kind = "finding problem" if finding.is_problem else "finding"
    title = f'<span class="kind">{escape(finding.kind)}</span> {escape(finding.title)}'
    parts = [f'<section class="{kind}"><h3>{title}</h3>']
    if finding.place.file:
        parts.append(f'<div class="where">{escape(str(finding.place))}</div>')
    if finding.source:
        parts.append(f"<pre>{escape(finding.source)}</pre>")
    parts += [f"<p>{escape(line.strip())}</p>" for line in finding.details.splitlines() if line.strip()]
    if finding.to_do:
        parts.append(f"<p><b>What to do:</b> {escape(finding.to_do)}</p>")
    if finding.patch:
        lines = (f'<span class="{_side(line)}">{escape(line)}</span>' for line in finding.patch.splitlines())
        parts.append(f"<pre>{chr(10).join(lines)}</pre>")
    return "".join([*parts, "</section>"])


def _side(line: str) -> str:
    return "minus" if line.startswith("-") else "plus"
