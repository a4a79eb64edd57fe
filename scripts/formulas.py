"""A hook of mkdocs: formulas become MathML while the site is built, so that a page needs no script and no network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

# What pymdownx.arithmatex makes of $…$ and $$…$$ with `generic: true`.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
# Where the converter and TeX differ: capital Greek letters stand upright, a slash has no space about it, bars are no
# higher than a letter (MathML takes a lone one for a fence that grows), and a space follows log.
AS_IN_TEX = {
    r"<mi>(&#x003(?:9[1-9A-F]|A[0-9]);)</mi>": r'<mi mathvariant="normal">\1</mi>',
    r"<mo>(&#x0002F;)</mo>": r'<mo lspace="0" rspace="0">\1</mo>',
    r"<mo>(&#x0007C;|&#x02016;)</mo>": r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>',
    r"<mi>log</mi>(?!<mo)": '<mi>log</mi><mspace width="0.17em"/>',
}


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""

    def mathml(match: re.Match[str], display: str) -> str:
        formula = html.unescape(match[1]).strip()
        result = convert(formula, display=display)
        if "\\" in result:
            raise PluginError(f"{page.file.src_uri}: this formula has a command that MathML lacks: {formula}")
        for pattern, replacement in AS_IN_TEX.items():
            result = re.sub(pattern, replacement, result)
        return result

    content = INLINE.sub(lambda match: mathml(match, "inline"), content)
    return BLOCK.sub(lambda match: f'<div class="formula">{mathml(match, "block")}</div>', content)
