"""Lane style: CSS of the lane drawings, for light and dark backgrounds."""

from __future__ import annotations

from spaceport.serving.page.modules import style

COLOURS = style("colours")
MARKS = style("marks")
