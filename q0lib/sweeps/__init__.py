"""Notebooks run, swept over a grid, and refreshed. Nothing here knows which study they tell."""

import sys

# If it finds this, jsonschema (behind nbformat) compiles a grammar of addresses at import: a second
# of every sweep, of each of its points and of every notebook that imports one. Notebooks need none.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
