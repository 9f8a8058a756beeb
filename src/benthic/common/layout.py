"""The owner function and page arithmetic: the only place that says which rank stores a page."""


def owner_of(page_idx: int, num_owners: int) -> int:
    """The lane that stores page `page_idx` (its absolute index in the sequence)."""
    return page_idx % num_owners


def owner_counts(first_page: int, num_pages: int, num_owners: int) -> tuple[int, ...]:
    """How many of the pages `first_page … first_page + num_pages - 1` each owner stores."""
    base, extra = divmod(num_pages, num_owners)
    start = first_page % num_owners
    return tuple(base + (1 if (o - start) % num_owners < extra else 0) for o in range(num_owners))


def ceil_div(a: int, b: int) -> int:
    """The least integer n with n * b >= a."""
    return -(-a // b)
