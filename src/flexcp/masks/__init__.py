"""Masks: which (query, key) pairs of a document attend.

The mask of a document is a disjoint union of *slices*, which are rectangles of queries x keys cut by a diagonal band
(:mod:`flexcp.masks.slices`). A :class:`Mask` is the rule that gives the slices of a document of any length
(:mod:`flexcp.masks.mask`). Users make a mask by name (:mod:`flexcp.masks.named`), from another description
(:mod:`flexcp.masks.conversions`) or from text (:mod:`flexcp.masks.text`). Documents whose sequences share their
beginnings are trees (:mod:`flexcp.masks.tree`), which :mod:`flexcp.masks.tree_of` makes from token ids;
:mod:`flexcp.masks.branches` finds the tree of any mask. All names can be imported from here.
"""

from flexcp.masks.branches import MAY_BRANCH, depths, tree_under
from flexcp.masks.conversions import (
    MASK_MOD_MAX_LENGTH,
    MASK_MOD_MAX_SLICES,
    from_cu_seqlens,
    from_key_ranges,
    from_mask_mod,
    from_slices,
)
from flexcp.masks.mask import EXPLICIT, NO_LIMIT, Mask
from flexcp.masks.named import (
    causal,
    causal_blockwise,
    chunked,
    full,
    lambda_,
    modality,
    named_mask,
    prefix,
    public_name,
    shared_question,
    window,
)
from flexcp.masks.slices import (
    HI,
    K0,
    K1,
    LO,
    LONGEST,
    Q0,
    Q1,
    UNBOUNDED,
    area,
    cut,
    is_empty,
    overlapping_pair,
    rows_area,
    shift,
    trim,
)
from flexcp.masks.text import MASK_FORMS, MASK_SIGNATURES, parse_mask
from flexcp.masks.tree import Tree, tree, tree_order, window_of, window_of_tree, windowed
from flexcp.masks.tree_of import TokenTree, tree_of

__all__ = [
    "EXPLICIT",
    "HI",
    "K0",
    "K1",
    "LO",
    "LONGEST",
    "MASK_FORMS",
    "MASK_MOD_MAX_LENGTH",
    "MASK_MOD_MAX_SLICES",
    "MASK_SIGNATURES",
    "MAY_BRANCH",
    "NO_LIMIT",
    "Q0",
    "Q1",
    "UNBOUNDED",
    "Mask",
    "TokenTree",
    "Tree",
    "area",
    "causal",
    "causal_blockwise",
    "chunked",
    "cut",
    "depths",
    "from_cu_seqlens",
    "from_key_ranges",
    "from_mask_mod",
    "from_slices",
    "full",
    "is_empty",
    "lambda_",
    "modality",
    "named_mask",
    "overlapping_pair",
    "parse_mask",
    "prefix",
    "public_name",
    "rows_area",
    "shared_question",
    "shift",
    "tree",
    "tree_of",
    "tree_order",
    "tree_under",
    "trim",
    "window",
    "window_of",
    "window_of_tree",
    "windowed",
]
