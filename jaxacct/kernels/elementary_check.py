"""stub"""


def failure() -> str | None:
    return None
