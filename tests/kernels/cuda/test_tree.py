"""A tree of drafts has, along each of its paths, the results of a chain of the same drafts."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.attention.paged import paged_attention
from kernels.cuda.branch import BRANCH_TOKENS, add_branch
from kernels.cuda.ngram import propose_ngram
from kernels.cuda.step_inputs import load_step
from kernels.cuda.tree_acceptance import PathCompaction
from kernels.paged_attention import KVPages
from kernels.row_kinds import DEFER
from kernels.step_tensors import TreeRows
from tests.kernels.accept_cases import Case, random_cases, reference_token, run
from tests.kernels.attention_reference import inputs, paged_attention_reference, pages_of, table_of
from tests.kernels.tree_cases import random_parents, tree_of, way_to


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize(
    ("P", "Hq", "Hkv", "D", "window", "chunk", "dtype"),
    [
        (8, 6, 2, 64, 0, 0, torch.float16),
        (5, 1, 1, 80, 21, 0, torch.float32),
        (16, 2, 1, 64, 0, 140, torch.float32),
    ],
)
def test_a_path_has_the_bits_of_a_chain_of_its_drafts(
    device: torch.device, P: int, Hq: int, Hkv: int, D: int, window: int, chunk: int, dtype: torch.dtype
) -> None:
    """The rows of one sequence begin near the end of a split, so that they lie in two; those of another at position
    0."""
    g, starts, R, N = torch.Generator().manual_seed(P), [0, 125, 150], 16, 20
    B, limits = len(starts), {"scale": D**-0.5, "window": window, "chunk": chunk}
    q, k, v = inputs(B, P, Hq, Hkv, D, dtype, device)
    table = table_of(B, N, device)
    trees = [random_parents(g, P) for _ in starts]
    tree = tree_of(trees, [[0] * (P - 1)] * B, R, device)
    positions = (torch.tensor(starts)[:, None] + tree.depth_BR[:, :P].cpu()).int()
    positions[0, P - 2 :] = -1  # padding
    sinks_H = torch.randn(Hq, generator=g).to(device)
    pages = pages_of(B * N, Hkv, 16, D, dtype, device, seed=4)
    out = paged_attention(
        *(q, k, v, pages, table, positions.to(device)),
        sinks_H=sinks_H,
        tree_rows_BRR=tree.rows_BRR,
        **limits,
    )
    for b, start in enumerate(starts):
        for row in range(P):
            if positions[b, row] < 0:
                assert not out[b, row].any()
                continue
            # Row j lies j after the first one.
            page, place = table[b, (start + row) // 16], (start + row) % 16
            assert torch.equal(pages.k[page, :, place], k[b, row])
            assert torch.equal(pages.v[page, :, place], v[b, row])
            if row in trees[b]:
                continue  # it is on the way to its child
            way = way_to(trees[b], row)
            chain = torch.full((1, P), -1, dtype=torch.int32)
            chain[0, : len(way)] = start + torch.arange(len(way))
            padded = way + [0] * (P - len(way))
            one = (t[b : b + 1, padded] for t in (q, k, v))
            other = pages_of(B * N, Hkv, 16, D, dtype, device, seed=4)
            alone = paged_attention(*one, other, table[b : b + 1], chain.to(device), sinks_H=sinks_H, **limits)
            assert torch.equal(alone[0, : len(way)], out[b, way]), (b, way)


def test_a_tree_has_the_results_of_the_reference(device: torch.device) -> None:
    parents, start, D = [0, 1, 0, 3, 3], 37, 64
    q, k, v = inputs(1, 6, 4, 2, D, torch.float32, device)
    table = table_of(1, 8, device)
    tree = tree_of([parents], [[0] * 5], 6, device)
    positions = (start + tree.depth_BR).int()
    pages = pages_of(8, 2, 16, D, torch.float32, device, seed=4)
    got = paged_attention(q, k, v, pages, table, positions, scale=0.125, tree_rows_BRR=tree.rows_BRR)
    for row in range(6):
        way = way_to(parents, row)
        chain = (start + torch.arange(len(way)))[None].int().to(device)
        plain = pages_of(8, 2, 16, D, torch.float32, device, seed=4)
        want = paged_attention_reference(*(t[:, way] for t in (q, k, v)), plain, table, chain, scale=0.125)
        torch.testing.assert_close(got[0, row], want[0, -1], atol=2e-5, rtol=2e-5)


def test_the_keys_of_an_accepted_path_are_moved_together(device: torch.device) -> None:
    """Two layers of one shape and one of another; three lanes, of which one is padding and one accepts a chain."""
    B, R, N = 4, 8, 4
    shapes = [(2, 16, 80), (2, 16, 80), (1, 16, 64)]
    layers = [
        KVPages(*(torch.randn(B * N, *shape).half().to(device) for _ in range(2)), token_major=True) for shape in shapes
    ]
    before = [(layer.k.clone(), layer.v.clone()) for layer in layers]
    table = table_of(B, N, device)
    walked = {0: [0, 2, 3, 7], 1: [0, 1, 2], 3: [0, 3, 4, 5, 6]}
    first = {0: 13, 1: 20, 3: 30}
    slots = torch.tensor([0, 1, -1, 3], dtype=torch.int32, device=device)
    tree = TreeRows.allocate(B, R, device)
    length, count = (torch.zeros(B, dtype=torch.int32, device=device) for _ in range(2))
    count[2] = 5
    for b, rows in walked.items():
        tree.walked_BR[b, : len(rows)] = torch.tensor(rows)
        length[b], count[b] = first[b] + 1 + len(rows), len(rows)
    PathCompaction(layers)(slots, length, count, tree, table)
    for layer, (old_k, old_v) in zip(layers, before, strict=True):
        for new, old in ((layer.k, old_k), (layer.v, old_v)):
            want = old.clone()
            for b, rows in walked.items():
                for i, row in enumerate(rows):
                    source, target = first[b] + row, first[b] + i
                    moved = old[table[b, source // 16], :, source % 16]
                    want[table[b, target // 16], :, target % 16] = moved
            assert torch.equal(new, want)


def test_load_lays_out_the_rows_of_a_tree(device: torch.device) -> None:
    S, R, P, g = 3, 8, 6, torch.Generator().manual_seed(1)
    parents, drafts = torch.zeros(S, R, dtype=torch.int32), torch.randint(300, (S, R), generator=g).int()
    trees = [random_parents(g, R + 1) for _ in range(S)]
    parents.copy_(torch.tensor(trees))
    # What a slot without drafts has there may be anything: a parent has a smaller row.
    parents[2] = 100
    want = tree_of(
        [t[:-1] for t in [trees[1], trees[0], [*range(R)]]], [drafts[s].tolist() for s in (1, 0, 2)], R, device
    )
    length, num = torch.tensor([9, 30, 5]).int().to(device), torch.tensor([7, 4, 0]).int().to(device)
    slots, limits = torch.tensor([1, 0, 2]).int().to(device), torch.full((3,), R).int().to(device)
    history = torch.randint(300, (S, 40), generator=g).int().to(device)
    ids, positions = (torch.zeros(3, P, dtype=torch.int32, device=device) for _ in range(2))
    table, tree = torch.zeros(S, 4, dtype=torch.int32, device=device), TreeRows.allocate(3, R, device)
    lane = (drafts.clone().to(device), num.clone(), table.clone(), limits)
    done = torch.zeros(S, dtype=torch.bool, device=device)
    load_step(
        *(slots, history, length, drafts.to(device), num, done, table, ids, positions, *lane),
        parents.to(device),
        tree,
    )
    for name in ("parent_BR", "depth_BR"):
        assert torch.equal(getattr(tree, name), getattr(want, name))
    for b, s in enumerate((1, 0, 2)):
        rows = min(int(num[s]), P - 1) + 1
        assert ids[b, 1:rows].tolist() == drafts[s, : rows - 1].tolist()
        first = int(length[s]) - 1
        assert positions[b].tolist() == [first + int(d) for d in want.depth_BR[b, :rows]] + [-1] * (P - rows)
        for row in range(R):
            depth = int(want.depth_BR[b, row])
            assert torch.equal(tree.rows_BRR[b, row, : depth + 1], want.rows_BRR[b, row, : depth + 1])
            assert torch.equal(tree.tokens_BRR[b, row, :depth], want.tokens_BRR[b, row, :depth])


def walk(case: Case, parents: list[int], logits: torch.Tensor, first_row: int) -> tuple[list[int], list[int]]:
    """Return the emitted tokens and their rows by the definition, in float64."""
    history, row, out, rows = list(case.history), 0, list[int](), list[int]()
    while True:
        if case.kinds and case.kinds[row] >= DEFER:
            return out, rows
        token = reference_token(case, history, logits[first_row + row], row)
        if token is None:
            return out, rows
        history.append(token)
        out.append(token)
        rows.append(row)
        children = [j + 1 for j, (p, t) in enumerate(zip(parents, case.drafts, strict=True)) if (p, t) == (row, token)]
        if token in case.stop or len(history) >= case.max_length or not children:
            return out, rows
        row = children[0]


def tree_case(g: torch.Generator, case: Case, parents: list[int], logits: torch.Tensor, first_row: int) -> None:
    """Give a case the drafts of a tree, of which about half are right."""
    case.drafts = []
    for j, parent in enumerate(parents):
        way = [case.drafts[row - 1] for row in way_to(parents, parent)[1:]]
        right = reference_token(case, case.history + way, logits[first_row + parent], parent)
        taken = {case.drafts[i] for i in range(j) if parents[i] == parent}
        chance = int(torch.randint(2, (1,), generator=g))
        case.drafts.append(right if chance and right is not None and right not in taken else 3 + j)


def test_acceptance_follows_the_definition_on_random_trees(device: torch.device) -> None:
    """With one tile of columns and with two."""
    g, deepest, branched, rounds = torch.Generator().manual_seed(50), 0, False, 1 if device.type == "cpu" else 20
    for V, dtype in [(50, torch.float32)] * 3 * rounds + [(290, torch.float16)] * rounds:
        B, rows, R = 3, 7, 8
        logits = (torch.randn(B * rows, V, generator=g) * 3).to(dtype)
        trees = [random_parents(g, rows) for _ in range(B)]
        cases = random_cases(g, logits, B, rows)
        for b, case in enumerate(cases):
            case.num_logprobs = 2
            tree_case(g, case, trees[b], logits, b * rows)
        tree = tree_of(trees, [case.drafts for case in cases], R, device)
        result, history, length, _ = run(cases, logits, rows, R, device, tree=tree)
        for b, case in enumerate(cases):
            want, walked = walk(case, trees[b], logits, b * rows)
            count = int(result.num_emitted_B[b])
            assert result.emitted_BR[b, :count].tolist() == want, case
            assert tree.walked_BR[b, :count].tolist() == walked
            assert history[b, : int(length[b])].tolist() == case.history + want
            own = torch.log_softmax(logits[b * rows :][walked].float(), dim=-1)
            for i, token in enumerate(want):
                assert float(result.logprob_BR[b, i]) == pytest.approx(float(own[i, token]), abs=1e-3)
            deepest, branched = max(deepest, count), branched or walked != [*range(count)]
    assert deepest > 3
    assert branched


def test_a_chain_as_a_tree_has_the_results_of_a_chain(device: torch.device) -> None:
    g, rows, V = torch.Generator().manual_seed(5), 5, 60
    logits = torch.randn(3 * rows, V, generator=g) * 3
    cases = random_cases(g, logits, 3, rows)
    cases[1].kinds = [0, 0, DEFER, 0, 0]
    cases[2].max_length = len(cases[2].history) + 2
    chain = [[*range(rows - 1)]] * 3
    tree = tree_of(chain, [case.drafts for case in cases], rows, device)
    plain, plain_history, _, plain_state = run(cases, logits, rows, rows, device)
    walked, history, _, state = run(cases, logits, rows, rows, device, tree=tree)
    for name in ("num_emitted_B", "num_accepted_B", "finish_B", "blocked_B"):
        assert torch.equal(getattr(plain, name), getattr(walked, name)), name
    assert torch.equal(plain_history, history)
    assert torch.equal(plain_state.done_S, state.done_S)


def branched(
    history: list[int], most: int, least: int, room: int, prompt: int, *, guided: bool = False
) -> tuple[list[int], list[int]]:
    """Return drafts and parents by the rule of kernels/cuda/branch.py, in plain Python."""
    n, own = len(history), 0

    def places(suffix: int) -> list[int]:
        return [end for end in range(suffix, n) if history[end - suffix : end] == history[n - suffix :]]

    def best(without: int | None) -> tuple[int, list[int]]:
        for size in range(min(most, n - 1), least - 1, -1):
            ends = [end for end in places(size) if history[end] != without]
            if ends:
                end = ends[-1] if ends[-1] >= prompt else ends[0]
                return size, history[end:][: 2 * size + 1]
        return 0, []

    size, chain = best(None)
    chain = chain[:room]
    if not chain or guided:
        return chain, [*range(len(chain))]
    _, branch = best(chain[0])
    if branch and size < most:
        chain = chain[: max(room - min(len(branch), BRANCH_TOKENS), 1)]
    own, branch = len(chain), branch[: room - len(chain)]
    return chain + branch, [0 if i == own else i for i in range(own + len(branch))]


@pytest.mark.parametrize(("most", "ids"), [(3, 8), (4, 6), (2, 12)])
def test_a_branch_begins_with_another_token(device: torch.device, most: int, ids: int) -> None:
    S, R, g, num_branches = 12, 8, torch.Generator().manual_seed(ids), 0
    length = torch.randint(2, 140, (S,), generator=g).int()
    history = torch.randint(ids, (S, 160), generator=g).int()
    prompt, limit = length // 2, torch.randint(0, R, (S,), generator=g).int()
    most_tokens = length + torch.randint(2, 20, (S,), generator=g).int()
    slots, guided = torch.arange(S).flip(0).int(), torch.arange(S) % 5 == 0
    drafts, parents = (torch.full((S, R), 99, dtype=torch.int32, device=device) for _ in range(2))
    num = torch.zeros(S, dtype=torch.int32, device=device)
    slot = [t.to(device) for t in (history, length, prompt, limit, most_tokens)]
    sizes = {"ngram_max": most}
    propose_ngram(slots.to(device), *slot, drafts, num, **sizes)
    add_branch(slots.to(device), guided.to(device), *slot, drafts, num, parents, **sizes)
    for b, s in enumerate(slots.tolist()):
        room = max(0, min(int(limit[s]), R - 1, int(most_tokens[s] - length[s]) - 1))
        text = history[s, : int(length[s])].tolist()
        want, want_parents = branched(text, most, 1, room, int(prompt[s]), guided=bool(guided[b]))
        assert drafts[s, : int(num[s])].tolist() == want
        assert parents[s, : int(num[s])].tolist() == want_parents
        roots = [want[i] for i, parent in enumerate(want_parents) if parent == 0]
        assert len(set(roots)) == len(roots)
        num_branches += len(roots) > 1
    assert num_branches > 0


def test_a_branch_begins_behind_the_jump_forward_tokens(device: torch.device) -> None:
    R, ids = 8, [7, 1, 5, 5, 7, 1, 6, 6, 7]
    history = torch.zeros(3, 40, dtype=torch.int32)
    history[:, : len(ids) + 1] = torch.tensor([*ids, 1])  # 1 is forced, and lies after the length
    length, forced = torch.full((3,), len(ids)).int(), torch.tensor([1, 0, -1]).int().to(device)
    drafts, parents = torch.zeros(3, R, dtype=torch.int32), torch.full((3, R), 50, dtype=torch.int32)
    drafts[:, 0] = 1
    slot = [t.to(device) for t in (history, length, length.clone(), torch.full((3,), 6).int(), length + 20)]
    drafts, parents, num = drafts.to(device), parents.to(device), torch.tensor([1, 0, 3]).int().to(device)
    slots, guided = torch.arange(3).int().to(device), torch.zeros(3, dtype=torch.bool, device=device)
    more = {"ngram_max": 3, "num_jump_forward_B": forced}
    propose_ngram(slots, *slot, drafts, num, **more)
    add_branch(slots, guided, *slot, drafts, num, parents, **more)
    assert drafts[0, : int(num[0])].tolist() == [1, 5, 5, 7, 6, 6]
    assert parents[0, : int(num[0])].tolist() == [0, 1, 2, 3, 1, 5]
    # A lane that emitted nothing has its drafts, and the rows that are cached for them.
    assert int(num[2]) == 3
    assert parents[2].tolist() == [50] * R
