"""`page`: the pre-flight of a training as one HTML file, without scripts and without anything from elsewhere."""

from __future__ import annotations

from html import escape

from xla_adapters.tools.run_preflight import RunPreflight

_STYLE = """
:root { color-scheme: light dark; --card: #f6f8fa; --bad: #b42318; --good: #116329 }
@media (prefers-color-scheme: dark) { :root { --card: #161b22; --bad: #ff7b72; --good: #56d364 } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem }
.verdict { font-size: 1.1rem; font-weight: 600 } .bad { color: var(--bad) } .good { color: var(--good) }
pre { background: var(--card); border-radius: 6px; overflow-x: auto; padding: .6rem; font-size: .85rem }
"""


def page(report: RunPreflight) -> str:
    """The report as the text of an HTML file."""
    title = f"Pre-flight: {report.what} on {report.topology}"
    kind = "good" if report.fits else "bad"
    verdict = f'<p class="verdict {kind}">{escape(report.verdict)}</p>'
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{verdict}{report.section()}</body></html>\n"
    )
