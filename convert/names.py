"""Names that come from files: held to a sane length and to printable characters, and shortened in messages."""

MAX_NAME = 1024


def name_problem(name: str) -> str | None:
    """What is wrong with a tensor's, member's or key's name, or None.

    Names end up in file names, manifests and terminals: control characters there are an accident or an attack.
    """
    if len(name) > MAX_NAME:
        return f"the name {shown(name)} is {len(name)} characters long, more than {MAX_NAME}"
    if not name.isprintable():
        return f"the name {shown(name)} holds characters that cannot be printed"
    return None


def shown(text: str, limit: int = 100) -> str:
    """Text from a file as it can safely be printed."""
    if len(text) > limit:
        return repr(text[:limit])[:-1] + "...'"
    return text if text.isprintable() else repr(text)


def batched_names(names: list[str], limit: int = 5, total: int | None = None) -> str:
    """The first few names, and how many more there are (of `total`, where `names` is only a part)."""
    listed = ", ".join(shown(name, 200) for name in names[:limit])
    more = (len(names) if total is None else total) - min(limit, len(names))
    return f"{listed} and {more} more" if more else listed
