"""Self-contained HTML: libraries packed inside, data made inert, a policy that forbids remote loads."""

from __future__ import annotations

import base64
import gzip
import html
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
# Packages' own bundles, and the global that tells that one has run.
LIBRARIES = {
    "plotly": ("plotly", "package_data/plotly.min.js"),
    "circuitsvis": ("circuitsvis", "dist/cdn/iife.js"),
}


def escape(text: object) -> str:
    """Text from data, safe inside HTML and attributes."""
    return html.escape(str(text), quote=True)


def script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("\u2028", "\\u2028")


def asset(name: str) -> str:
    """A style sheet or script of ours."""
    return (resources.files("mmlens.viz") / "assets" / name).read_text()


@cache
def packed_library(name: str) -> str:
    """A library as base64 of gzip, which the page unpacks itself."""
    package, path = LIBRARIES[name]
    source = (resources.files(package) / path).read_bytes()
    # The bundle names its source map, which is not beside it.
    source = source.split(b"\n//# sourceMappingURL=")[0]
    return base64.b64encode(gzip.compress(source, 9, mtime=0)).decode()


def png_uri(png: bytes) -> str:
    """A picture as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def document(
    title: str, body: str, *, libraries: tuple[str, ...], charts: dict[str, Any], patterns: dict[str, Any]
) -> str:
    """A whole page.

    Parameters
    ----------
    body
        Trusted markup; everything from data inside it went through `escape`.
    libraries
        Names in `LIBRARIES`.
    charts
        {element id: plotly figure as plain data}.
    patterns
        {element id: circuitsvis AttentionPattern props}.
    """
    packed = "\n".join(
        f'<script type="text/plain" id="lib-{name}">{packed_library(name)}</script>' for name in libraries
    )
    data = script_json({"libraries": list(libraries), "charts": charts, "patterns": patterns})
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">
<title>{escape(title)}</title>
<style>{asset("page.css")}</style>
</head>
<body>
{body}
{packed}
<script type="application/json" id="data">{data}</script>
<script>{asset("page.js")}</script>
</body>
</html>
"""


def write(path: str | Path, text: str) -> Path:
    """Write a page, making its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
