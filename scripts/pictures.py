"""Byte diagrams of docs/kv_layout.md: boxes and words as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cute_kernels.kv_format import (
    BF16,
    FP8,
    INLINE,
    INLINE_GROUP,
    INLINE_ROPE,
    INLINE_SCALES,
    NOPE_DIM,
    PACKED,
    PACKED_DATA_BYTES,
    PACKED_FOOTER_BYTES,
    SCALE_GROUP,
)
from cute_kernels.kv_pool import PoolPlan

WIDTH = 960
COLOURS = {
    "values": "#9ecae1",
    "rotated": "#fdd0a2",
    "scales": "#a1d99b",
    "keys": "#bcbddc",
    "state": "#fdae6b",
    "waste": "#f0f0f0",
    "gap": "#f0f0f0",
}


class Picture:
    """Boxes from top to bottom; `height` grows with them."""

    def __init__(self, title: str) -> None:
        self.title, self.height = title, 14.0
        self.shapes: list[str] = []

    def line(self, text: str, x: float = 10, size: int = 13, anchor: str = "start") -> None:
        self.height += size + 5
        self._text(text, x, self.height, size, anchor)

    def _text(self, text: str, x: float, y: float, size: int, anchor: str) -> None:
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>')

    def row(self, boxes: Sequence[tuple[str, float, str]], height: float = 34, left: float = 10, width: float = WIDTH - 20) -> None:
        """Boxes (label, share, colour) side by side over `width`; shares are relative to their sum."""
        self.height += 6
        total = sum(share for _, share, _ in boxes)
        x = left
        for label, share, colour in boxes:
            w = width * share / total
            shape = f'<rect x="{x:.1f}" y="{self.height:g}" width="{w:.1f}" height="{height:g}" fill="{COLOURS[colour]}" stroke="#333"/>'
            self.shapes.append(shape)
            if label:
                self._text(label, x + w / 2, self.height + height / 2 + 4, 12, "middle")
            x += w
        self.height += height

    def space(self, points: float = 10) -> None:
        self.height += points

    def svg(self) -> str:
        height = self.height + 12
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
        style = 'font-family="Helvetica, Arial, sans-serif" fill="#111"'
        ground = f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>'
        return "\n".join([f"{head} {style}>", f"<title>{escape(self.title)}</title>", ground, *self.shapes, "</svg>", ""])


def rows() -> str:
    """The rows of every KV format, to one scale."""
    picture = Picture("Rows of the KV formats")
    full = WIDTH - 20
    rotated = 512 - NOPE_DIM
    for fmt, size in ((BF16, 2), (FP8, 1)):
        picture.line(f"{fmt.name}: {fmt.row_bytes} bytes a row, rows back to back")
        values, rope = f"{NOPE_DIM} values, {NOPE_DIM * size} B", f"{rotated} rotated, {rotated * size} B" if size == 2 else f"{rotated} B"
        boxes = [(values, NOPE_DIM * size, "values"), (rope, rotated * size, "rotated")]
        picture.row(boxes, width=full * fmt.row_bytes / BF16.row_bytes)
        picture.space()
    groups = NOPE_DIM // SCALE_GROUP
    picture.line(f"{PACKED.name}: {PACKED_DATA_BYTES} data bytes, and {PACKED_FOOTER_BYTES} bytes in the footer of the page")
    boxes = [(f"{NOPE_DIM} E4M3, {NOPE_DIM} B", NOPE_DIM, "values"), (f"{rotated} BF16, {2 * rotated} B", 2 * rotated, "rotated")]
    picture.row(boxes, width=full * PACKED_DATA_BYTES / BF16.row_bytes)
    picture.row([*((f"s{i}", 1.0, "scales") for i in range(groups)), ("0", 1.0, "gap")], width=280)
    picture.line(f"s0 … s{groups - 1}: UE8M0 scales, one for {SCALE_GROUP} values each; the last byte is 0", size=12)
    picture.space()
    scales, inline_rope = INLINE_ROPE - INLINE_SCALES, INLINE.row_bytes - INLINE_ROPE
    picture.line(f"{INLINE.name} (V3.2): {INLINE.row_bytes} bytes a row, rows back to back; read by gather_upconvert")
    boxes = [(f"{INLINE_SCALES} E4M3, {INLINE_SCALES} B", INLINE_SCALES, "values"), ("", scales, "scales")]
    picture.row([*boxes, (f"{rotated} BF16, {inline_rope} B", inline_rope, "rotated")], width=full * INLINE.row_bytes / BF16.row_bytes)
    picture.line(f"between them {scales // 4} fp32 scales ({scales} B), one for {INLINE_GROUP} values each", size=12)
    return picture.svg()


def packed_page(page_rows: int = 64) -> str:
    """A page of packed rows: data, footers, padding up to the stride."""
    picture = Picture("A page of packed rows")
    picture.line(f"page p of {page_rows} rows, from byte p x page stride")
    shown = [("row 0", 1.0, "values"), ("row 1", 1.0, "values"), ("…", 0.6, "values"), (f"row {page_rows - 1}", 1.0, "values")]
    feet = [("f0", 0.35, "scales"), ("f1", 0.35, "scales"), ("…", 0.3, "scales"), (f"f{page_rows - 1}", 0.35, "scales")]
    picture.row([*shown, *feet, ("other layers, padding", 1.4, "gap")], height=40)
    data = page_rows * PACKED_DATA_BYTES
    picture.line(f"data row i at byte {PACKED_DATA_BYTES} i; footer i at byte {page_rows} x {PACKED_DATA_BYTES} + 8 i = {data} + 8 i")
    picture.line(f"payload {page_rows * PACKED.row_bytes} bytes; the footers follow the page's rows, not its stride")
    picture.line(f"the tensor's last dimension, {PACKED.row_elements}, is nominal: view[p, i] is not row i")
    return picture.svg()


def block(plan: PoolPlan, model: str) -> str:
    """One block as each group uses it, to one scale."""
    picture = Picture(f"A block of {plan.block_bytes} bytes, by group")
    picture.line(f"{model}, {plan.kv_format.name} rows: every block has {plan.block_bytes:,} bytes; one group uses it at a time")
    colour = {"compressed": "values", "window": "values", "index_keys": "keys", "state": "state", "index_state": "keys"}
    for group in plan.groups.values():
        picture.space(4)
        percent = 100 * group.waste_bytes / plan.block_bytes
        picture.line(
            f"{group.name}: {len(group.pages)} pages, {group.tokens_per_block} tokens of a request, {group.used_bytes:,} bytes used, "
            f"{percent:.1f}% waste",
            size=12,
        )
        boxes = [("", float(p.payload_bytes), colour[p.part]) for p in group.pages]
        end = group.pages[-1].offset + group.pages[-1].payload_bytes
        if end < plan.block_bytes:
            boxes.append(("", float(plan.block_bytes - end), "waste"))
        picture.row(boxes, height=20)
    picture.space()
    legend = [("KV rows", "values"), ("index keys and state", "keys"), ("compressor state", "state"), ("waste", "waste")]
    picture.row([(text, 1.0, c) for text, c in legend], height=22, width=560)
    return picture.svg()


def slots(page_rows: int = 2, span: int = 5) -> str:
    """Slots and storage rows of a pool whose pages lie apart."""
    picture = Picture("Slots and storage rows")
    picture.line(f"pages of {page_rows} rows, {span} rows apart (span {span}); index tables hold storage rows on SM100, slots on SM120")
    pages = 3
    cells = [(p, r) for p in range(pages) for r in range(span)]
    for name, number in (
        ("storage row", lambda p, r: str(p * span + r)),
        ("page, row", lambda p, r: f"{p}, {r}" if r < page_rows else ""),
        ("slot", lambda p, r: str(p * page_rows + r) if r < page_rows else ""),
    ):
        picture.line(name, size=12)
        picture.row([(number(p, r), 1.0, "values" if r < page_rows else "gap") for p, r in cells], height=24)
    picture.space()
    picture.line(f"slot = page x {page_rows} + row; storage row = page x {span} + row; grey: rows of other layers", size=12)
    return picture.svg()
