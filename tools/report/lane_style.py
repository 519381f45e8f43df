"""Lane style: CSS of the lane drawings, for light and dark backgrounds."""

from __future__ import annotations

COLOURS = """\
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1b1f24; --quiet: #59636e; --band: #f5f6f8; --rule: #dfe3e8; --rejected: #c62828;
  --drafted: #0b4091; --held: #06724a; --line: #b3460b; --engine: #5b3fa8; --outside: #c1750d;
  --c0: #0b4091; --c1: #c1750d; --c2: #8d23ef; --c3: #06925b; --c4: #742751; --c5: #848fa2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15191d; --ink: #e6e9ed; --quiet: #a3adb8; --band: #1b2026; --rule: #343c45; --rejected: #ff7a70;
    --drafted: #5a8fd8; --held: #4de8b0; --line: #f5b54a; --engine: #a78bfa; --outside: #f5b54a;
    --c0: #5a8fd8; --c1: #f5b54a; --c2: #9d5cff; --c3: #4de8b0; --c4: #b83f95; --c5: #c3d0e6;
  }
}
.t0 { --c: var(--c0); } .t1 { --c: var(--c1); } .t2 { --c: var(--c2); }
.t3 { --c: var(--c3); } .t4 { --c: var(--c4); } .t5 { --c: var(--c5); }
"""

MARKS = """\
text { fill: var(--ink); font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
.axis, .count { fill: var(--quiet); font-size: 11px; text-anchor: middle; font-variant-numeric: tabular-nums; }
.axis.first { text-anchor: start; } .axis.last { text-anchor: end; }
.name { font-weight: 600; }
.count { fill: var(--rejected); font-size: 9px; }
.band { fill: var(--band); }
.grid { stroke: var(--rule); stroke-width: 1; opacity: .7; }
.accepted { fill: var(--c); }
.own { fill: var(--paper); stroke: var(--c); stroke-width: 1.5; }
.rejected { fill: none; stroke: var(--rejected); stroke-width: 1; stroke-dasharray: 2 1.5; }
.prompt { fill: var(--quiet); opacity: .45; }
.forks { fill: var(--paper); stroke: var(--ink); stroke-width: 1; }
.end { fill: none; stroke: var(--ink); stroke-width: 2; }
.life, .fork { fill: none; stroke: var(--c); stroke-width: 1.5; }
.wait { fill: none; stroke: var(--c); stroke-width: 1.5; stroke-dasharray: 2 3; }
.root { fill: var(--c); }
"""
