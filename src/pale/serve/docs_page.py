"""API documentation as a plain page, made from the OpenAPI schema; it loads nothing from other sites."""

from __future__ import annotations

import re
from html import escape
from typing import Any

EXAMPLES = """curl -F file=@photo.jpg http://127.0.0.1:8000/predict/classification
curl --data-binary @photo.jpg 'http://127.0.0.1:8000/predict/detection?output=drawn' -o drawn.jpg
curl --data-binary @photo.jpg 'http://127.0.0.1:8000/predict/segmentation?output=mask' -o mask.png
curl --data-binary @photo.jpg 'http://127.0.0.1:8000/look?x=120&amp;y=80'
curl http://127.0.0.1:8000/health"""
FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pale: HTTP API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/serve.css">
</head>
<body>
<main class="manual">
<p class="faint"><a href="/">Back to the page</a></p>
<h1>HTTP API</h1>
<p>{summary}. Version {version}. Machine-readable: <a href="/openapi.json">openapi.json</a>.</p>
<pre>{examples}</pre>
{paths}
</main>
</body>
</html>
"""


def render(schema: dict[str, Any]) -> str:
    """Return the page: every route with its parameters and error codes."""
    paths = [
        _route(path, method, about)
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


def _route(path: str, method: str, about: dict[str, Any]) -> str:
    description = re.sub(r"`(.+?)`", r"<code>\1</code>", escape(about.get("description", "")))
    paragraphs = "".join(f"<p>{p}</p>" for p in description.split("\n\n"))
    body = about.get("requestBody", {}).get("description", "")
    rows = [
        _row(p["name"], f"{p.get('description', '')}{_choices(p['schema'])}")
        for p in about.get("parameters", [])
    ]
    if body:
        rows.append(_row("body", body))
    rows += [
        _row(code, a["description"]) for code, a in about["responses"].items() if code != "200"
    ]
    table = f"<div class='scroll'><table>{''.join(rows)}</table></div>" if rows else ""
    title = f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    return f"<section class='card'>{title}{paragraphs}{table}</section>"


def _row(name: str, text: str) -> str:
    return f"<tr><th><code>{escape(name)}</code></th><td>{escape(text)}</td></tr>"


def _choices(schema: dict[str, Any]) -> str:
    choices = f" ({', '.join(map(str, schema['enum']))})" if "enum" in schema else ""
    default = schema.get("default")
    return choices + ("" if default is None else f"; default {str(default).lower()}")
