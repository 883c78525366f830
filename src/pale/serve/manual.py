"""The API's manual as a plain page, made from its OpenAPI schema: nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from html import escape
from typing import Any

EXAMPLES = """curl -F file=@photo.jpg http://127.0.0.1:8000/predict/classification
curl --data-binary @photo.jpg 'http://127.0.0.1:8000/predict/detection?output=drawn' -o seen.jpg
curl --data-binary @photo.jpg 'http://127.0.0.1:8000/predict/segmentation?output=mask' -o mask.png
curl --data-binary @photo.jpg 'http://127.0.0.1:8000/look?x=120&amp;y=80'
curl http://127.0.0.1:8000/health"""
FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pale: the API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/serve.css">
</head>
<body>
<main class="manual">
<p class="faint"><a href="/">The page</a></p>
<h1>The API</h1>
<p>{summary}. Version {version}. For programs: <a href="/openapi.json">openapi.json</a>.</p>
<pre>{examples}</pre>
{paths}
</main>
</body>
</html>
"""


def page(schema: dict[str, Any]) -> str:
    """All that can be asked, with arguments and answers."""
    paths = [
        _question(path, method, about)
        for path, methods in schema["paths"].items()
        for method, about in methods.items()
    ]
    info = schema["info"]
    return FRAME.format(
        summary=escape(info.get("summary", "")),
        version=escape(info["version"]),
        examples=EXAMPLES,
        paths="\n".join(paths),
    )


def _question(path: str, method: str, about: dict[str, Any]) -> str:
    told = re.sub(r"`(.+?)`", r"<code>\1</code>", escape(about.get("description", "")))
    words = "".join(f"<p>{p}</p>" for p in told.split("\n\n"))
    body = about.get("requestBody", {}).get("description", "")
    rows = [
        _row(p["name"], f"{p.get('description', 'which task')}{_choices(p['schema'])}")
        for p in about.get("parameters", [])
    ]
    if body:
        rows.append(_row("body", body))
    rows += [
        _row(code, a["description"]) for code, a in about["responses"].items() if code != "200"
    ]
    table = f"<div class='scroll'><table>{''.join(rows)}</table></div>" if rows else ""
    title = f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    return f"<section class='card'>{title}{words}{table}</section>"


def _row(name: str, words: str) -> str:
    return f"<tr><th><code>{escape(name)}</code></th><td>{escape(words)}</td></tr>"


def _choices(schema: dict[str, Any]) -> str:
    choices = f" ({', '.join(map(str, schema['enum']))})" if "enum" in schema else ""
    default = schema.get("default")
    return choices + ("" if default is None else f"; by default {str(default).lower()}")
