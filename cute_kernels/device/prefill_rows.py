"""Row norms by matrix instructions: which lanes hold them."""


def owns_norms(lane):
    """Whether the diagonal of X X^T of 16 rows, lanes holding rows lane // 4 and lane // 4 + 8, is in this lane."""
    return (lane & 3) == (lane >> 3)
