"""The radix tree: matching, splitting and pruning keep every invariant, locks and recency go where they belong."""

import random

import pytest

from benthic.kvcache.errors import InvariantError
from benthic.kvcache.planner import Holding
from benthic.kvcache.tree import MAX_NODE_PAGES, Node, RadixTree


def chain(name: str, num_pages: int) -> tuple[bytes, ...]:
    """Hashes of a sequence: the letters of `name` are its first pages, the last letter goes on for ever."""
    letters = name + name[-1] * (num_pages - len(name))
    return tuple(letters[: i + 1].encode() for i in range(num_pages))


def insert(tree: RadixTree, hashes: tuple[bytes, ...], *, tick: int = 0) -> Node:
    """As the machine does it, with unlocked nodes: what is there stays, the rest hangs below."""
    known = tree.l1_match(hashes, len(hashes))
    parent = tree.node_ending_with(hashes[known - 1], known) if known else tree.root
    rest = hashes[known:]
    node = parent
    if rest:
        node = tree.insert(parent, rest, tick, l1_pages=tuple(range(known, known + len(rest))))[-1]
    tree.check()
    return node


def in_l1(node: Node) -> Holding:
    assert node.l1 is not None
    return node.l1


def use(tree: RadixTree, node: Node, tick: int, *, is_hit: bool) -> None:
    """A run that is opened and goes down to `node`."""
    tree.l1.lock(tree.l1.root)
    tree.l1_lock_path(node, tree.root, tick, is_hit=is_hit)


def shape(tree: RadixTree) -> list[tuple[int, int, int | None]]:
    """(first page, pages, parent's first page) of each node, by id."""
    return [(n.first, len(n.hashes), n.parent.first if n.parent else None) for n in tree.nodes.values()]


def test_a_long_run_is_a_chain_of_nodes_of_bounded_size() -> None:
    tree = RadixTree(4, 1000)
    insert(tree, chain("a", 2 * MAX_NODE_PAGES + 3))
    assert shape(tree) == [(0, 32, 0), (32, 32, 0), (64, 3, 32)]
    assert list(tree.l1.leaves) == [3]
    assert tree.l1.cached == tree.l1.evictable == [17, 17, 17, 16]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 70])
def test_match_finds_the_longest_cached_prefix(length: int) -> None:
    tree = RadixTree(1, 1000)
    insert(tree, chain("a", 40))
    assert tree.l1_match(chain("a", length), length) == min(length, 40)
    assert tree.l1_match(chain("aab", length), length) == min(length, 2)
    assert tree.l1_match(chain("b", length), length) == 0
    assert tree.l1_match(chain("a", length), 5) == min(length, 5)
    assert tree.l1_match((), 3) == 0


def test_a_split_leaves_the_lower_half_in_the_object_and_divides_every_list() -> None:
    tree = RadixTree(2, 1000)
    node = insert(tree, chain("a", 10), tick=3)
    below = insert(tree, chain("a", 12))
    use(tree, below, 7, is_hit=True)
    upper = tree.split(node, 3)
    tree.check()
    assert (upper.first, upper.end, node.first, node.end) == (0, 3, 3, 10)
    assert (in_l1(upper).pages, in_l1(node).pages) == ((0, 1, 2), (3, 4, 5, 6, 7, 8, 9))
    assert (in_l1(upper).counts, in_l1(node).counts) == ((2, 1), (3, 4))
    assert node.parent is upper
    assert below.parent is node
    marks = [(n.hits, in_l1(n).locks, in_l1(n).segment, in_l1(n).last_access) for n in (upper, node)]
    assert marks == [(1, 1, 1, 7)] * 2


@pytest.mark.parametrize("keep", [-1, 0, 10, 11])
def test_a_split_at_or_beyond_the_ends_is_loud(keep: int) -> None:
    tree = RadixTree(1, 100)
    node = insert(tree, chain("a", 10))
    with pytest.raises(InvariantError, match="can't be split"):
        tree.split(node, keep)


def test_inserting_what_is_there_is_loud() -> None:
    tree = RadixTree(1, 100)
    insert(tree, chain("a", 4))
    with pytest.raises(InvariantError, match="is in the tree already"):
        tree.insert(tree.root, chain("a", 2), 0, l1_pages=(7, 8))


def test_lists_of_different_lengths_are_loud() -> None:
    tree = RadixTree(1, 100)
    with pytest.raises(InvariantError, match="2 hashes and 1 pages"):
        tree.insert(tree.root, chain("a", 2), 0, l1_pages=(7,))
    node = insert(tree, chain("a", 4))
    in_l1(node).pages = in_l1(node).pages[:3]
    with pytest.raises(InvariantError, match=r"4 hashes, L1 \(\(0, 1, 2\)"):
        tree.split(node, 2)


def test_only_unlocked_leaves_are_pruned() -> None:
    tree = RadixTree(1, 100)
    upper = insert(tree, chain("a", 4))
    lower = insert(tree, chain("ab", 6))  # splits the first: a | aaa, b…
    top = upper.parent
    assert top is not None
    with pytest.raises(InvariantError, match="no unlocked leaf"):
        tree.l1_remove(top)
    use(tree, lower, 1, is_hit=False)
    with pytest.raises(InvariantError, match="no unlocked leaf"):
        tree.l1_remove(lower)
    assert tree.l1_remove(upper) == (1, 2, 3)
    tree.check()
    tree.l1_unlock_path(lower, 2)
    tree.l1_remove(lower)
    tree.l1_remove(top)
    tree.check()
    assert (tree.nodes, tree.l1.cached, tree.l1_match(chain("a", 4), 4)) == ({}, [0], 0)


def test_unlocking_more_often_than_locking_is_loud() -> None:
    tree = RadixTree(1, 100)
    with pytest.raises(InvariantError, match="unlocked more often"):
        tree.l1_unlock_path(insert(tree, chain("a", 4)), 1)


def test_the_protected_segment_is_bounded_and_gives_up_the_least_recent() -> None:
    tree = RadixTree(1, 20)  # at most 16 protected pages
    nodes = [insert(tree, chain(name, 6)) for name in "abc"]
    for tick, index in enumerate([0, 1, 0, 2]):
        use(tree, nodes[index], tick, is_hit=True)
        tree.l1_unlock_path(nodes[index], tick)
        tree.check()
    assert [in_l1(node).segment for node in nodes] == [1, 0, 1]


def test_of_one_path_the_deepest_node_loses_protection_first() -> None:
    tree = RadixTree(1, 50)  # at most 40 protected pages
    end = insert(tree, chain("a", 64))
    use(tree, end, 1, is_hit=True)
    tree.check()
    assert [in_l1(node).segment for node in tree.nodes.values()] == [1, 0]


def test_a_path_that_does_not_pass_a_node_is_loud() -> None:
    tree = RadixTree(1, 100)
    one, other = insert(tree, chain("a", 4)), insert(tree, chain("b", 4))
    with pytest.raises(InvariantError, match="not above the path"):
        list(tree.path(one, other))


@pytest.mark.parametrize("owners", [1, 3, 4])
def test_every_invariant_holds_through_random_changes(owners: int) -> None:
    rng = random.Random(owners)
    tree = RadixTree(owners, 120)
    locked: list[Node] = []
    for tick in range(400):
        name = "".join(rng.choice("ab") for _ in range(rng.randint(1, 6)))
        node = insert(tree, chain(name, rng.randint(len(name), 40)), tick=tick)
        if rng.random() < 0.5:
            use(tree, node, tick, is_hit=rng.random() < 0.7)
            locked.append(node)
        while locked and rng.random() < 0.45:
            tree.l1_unlock_path(locked.pop(rng.randrange(len(locked))), tick)
        while tree.l1.leaves and rng.random() < 0.5:
            tree.l1_remove(tree.nodes[rng.choice(list(tree.l1.leaves))])
        tree.check()
    for node in locked:
        tree.l1_unlock_path(node, 400)
    while tree.l1.leaves:
        tree.l1_remove(tree.nodes[next(iter(tree.l1.leaves))])
    tree.check()
    assert not tree.nodes
    assert tree.l1.cached == tree.l1.evictable == [0] * owners
