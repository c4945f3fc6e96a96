"""What nn.Module offers works on a sharded model or is refused; what its training rests on is right on every rank."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch import nn

pytestmark = pytest.mark.mp

WIDTH, VOCAB = 32, 512


class Mlp(nn.Module):
    """A block that is split over ranks, with what a test wants in it."""

    def __init__(self, dropout: float = 0.0, norm: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.dropout(torch.relu(self.up(self.norm(x)))))


class Table(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCAB, WIDTH, **options), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


class NoGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.target = Mlp(), Mlp()

    def forward(self, x):
        with torch.no_grad():
            target = self.target(x)
        return self.mlp(x) * target


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Custom(Mlp):
    def forward(self, x):
        return Doubled.apply(super().forward(x))


def inputs():
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))


def ids(*extra):
    return torch.tensor([[0, 3, 300, 511, *extra]])


def gradients_equal(build, example):
    """Every gradient of a sharded model is the unsharded one's; returns names that learn."""
    import numadist
    from numadist.pipeline.whole import gather_whole

    plain, sharded = build(), numadist.shard(build(), (example,), train=True)
    for model in (plain, sharded):
        model(example).sin().sum().backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    assert sharded.schema.blocks, "a block is split"
    for name, p in sharded.local.named_parameters():
        if wanted[name] is None or p.grad is None:
            assert p.grad is wanted[name], f"{name} has a gradient on one side"
            continue
        whole = gather_whole(p.grad, sharded.placement(name), sharded.rank, sharded.group)
        torch.testing.assert_close(
            whole, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    return {n for n, p in sharded.local.named_parameters() if p.requires_grad}


def check_padding(rank, world, options):
    gradients_equal(lambda: Table(**options), ids())


@pytest.mark.parametrize(
    "options",
    [{"padding_idx": 0}, {"padding_idx": 300}, {"padding_idx": -1}, {"scale_grad_by_freq": True}],
    ids=str,
)
def test_a_split_table_has_the_gradient_of_the_whole(pool, options):
    pool.run(check_padding, options)


def frozen():
    model = Mlp()
    for name in ("up.weight", "down.bias", "norm.bias"):
        model.get_parameter(name).requires_grad_(False)
    model.steps = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    return model


def check_frozen(rank, world):
    learns = gradients_equal(frozen, inputs())
    assert learns == {"up.bias", "down.weight", "norm.weight"}


def test_what_is_frozen_stays_frozen(pool):
    pool.run(check_frozen)


def check_no_grad(rank, world):
    gradients_equal(NoGradient, inputs())


def test_no_grad_inside_forward_is_kept(pool):
    pool.run(check_no_grad)


def check_custom(rank, world):
    import numadist

    with pytest.raises(numadist.ShardError, match=r"autograd\.Function Doubled, whose backward"):
        numadist.shard(Custom(), inputs(), train=True)
    model = Custom().eval()
    torch.testing.assert_close(numadist.shard(model, inputs())(inputs()), model(inputs()))


def test_a_custom_backward_is_refused_by_name(numa_pair):
    numa_pair.run(check_custom)


def check_dropout(rank, world, train):
    import numadist

    torch.manual_seed(100 + rank)
    sharded = numadist.shard(Mlp(dropout=0.5), inputs(), train=train)
    outputs = [sharded(inputs()).detach() for _ in range(3)]
    assert not torch.equal(outputs[0], outputs[1]), "dropout draws again"
    for mine in outputs:
        other = mine.clone()
        dist.broadcast(other, src=0)
        assert torch.equal(mine, other), "ranks drew other numbers"
    sharded.eval()
    plain = Mlp(dropout=0.5).eval()
    torch.testing.assert_close(sharded(inputs()), plain(inputs()), rtol=1e-5, atol=1e-5)
    assert sharded.train().training
    assert not torch.equal(sharded(inputs()), sharded(inputs()))


@pytest.mark.parametrize("train", [False, True])
def test_dropout_is_the_same_on_all_ranks_whatever_their_seeds(pool, train):
    pool.run(check_dropout, train)


def check_clip(rank, world, norm_type):
    import numadist

    plain, sharded = Mlp(), numadist.shard(Mlp(), inputs(), train=True)
    beside = nn.Parameter(torch.ones(3))
    norms = []
    for model in (plain, sharded):
        beside.grad = torch.ones(3)
        (model(inputs()).sin() * 50).sum().backward()
        every = [*model.parameters(), beside]
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in every], norm_type))
        norms.append(torch.nn.utils.clip_grad_norm_(every, 0.5, norm_type))
        norms.append(numadist.clip_grad_norm_(every, 1e9, norm_type))
    torch.testing.assert_close(norms[:3], norms[3:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_clipping_takes_the_norm_of_all_ranks(pool, norm_type):
    pool.run(check_clip, norm_type)


def trained(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        model(x).sin().sum().backward()
        optimizer.step()


def check_save(rank, world, path):
    import numadist

    model = numadist.shard(Mlp(), inputs(), train=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, optimizer, range(3))
    saved = {"model": model.state_dict(), "optimizer": numadist.optimizer_state_dict(model, optimizer)}
    if rank == 0:
        torch.save(saved, path)


def check_resume(rank, world, path):
    import numadist

    model = numadist.shard(Mlp(), inputs(), train=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    numadist.load_optimizer_state_dict(model, optimizer, saved["optimizer"])
    trained(model, optimizer, range(3, 6))
    plain = Mlp()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01)
    trained(plain, adam, range(6))
    whole = model.state_dict()
    assert set(whole) == set(plain.state_dict())
    torch.testing.assert_close(whole, plain.state_dict(), rtol=1e-4, atol=1e-5)
    plain.load_state_dict(whole)


def test_training_goes_on_with_another_number_of_ranks(numa_pair, tmp_path):
    path = str(tmp_path / "saved.pt")
    numa_pair.run(check_save, path)
    with ranks(3) as three:
        three.run(check_resume, path)


def check_module(rank, world):
    import numadist

    plain = Mlp().eval()
    sharded = numadist.shard(plain, inputs())
    assert not sharded.eval().training
    for same in (sharded.to("cpu"), sharded.to(torch.float32), sharded.float(), sharded.cpu()):
        assert same is sharded
    for refused, why in (
        (sharded.half, r"float32 on this rank's node, asked for torch\.float16"),
        (lambda: sharded.to("meta"), "convert the model before"),
        (lambda: copy.deepcopy(sharded), "cannot be copied; call numadist"),
        (lambda: pickle.dumps(sharded), "cannot be pickled; save its state_dict"),
        (lambda: sharded.load_state_dict({"up.weight": torch.zeros(1, 1)}), "has whole tensors"),
    ):
        with pytest.raises(numadist.ShardError, match=why):
            refused()
    seen = []
    handle = sharded.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    torch.testing.assert_close(sharded(inputs()), plain(inputs()))
    handle.remove()
    assert seen == [inputs().shape]
    assert all(p.requires_grad is False for p in sharded.requires_grad_(False).parameters())
    strict = sharded.load_state_dict({"norm.weight": torch.ones(WIDTH)}, strict=False)
    assert "up.weight" in strict.missing_keys
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"nonsense"'):
        sharded.load_state_dict({"nonsense": torch.ones(1)})


def test_what_a_module_offers_works_or_says_why_not(pool):
    pool.run(check_module)


def check_load(rank, world, train, assign):
    import numadist

    plain = Mlp().eval()
    sharded = numadist.shard(Mlp().eval(), inputs(), train=train)
    doubled = {name: t * 2 for name, t in plain.state_dict().items()}
    plain.load_state_dict(doubled)
    sharded.load_state_dict(doubled, assign=assign)
    torch.testing.assert_close(sharded(inputs()), plain(inputs()))
    assert {n: t.tolist() for n, t in sharded.state_dict().items()} == {
        n: t.tolist() for n, t in doubled.items()
    }, "every rank has the whole"


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_a_loaded_state_is_what_the_model_computes_with(pool, train, assign):
    pool.run(check_load, train, assign)


def check_packed(rank, world, dynamic):
    import numadist

    shapes = {"x": {0: torch.export.Dim.DYNAMIC}} if dynamic else None
    sharded = numadist.shard(Mlp().eval(), inputs(), compile=True, dynamic_shapes=shapes)
    sharded(inputs())
    with pytest.raises(numadist.ShardError, match="compile=True has packed the weights"):
        sharded.load_state_dict(Mlp().state_dict())
    if dynamic:  # else Inductor has thrown the parameters away, and says so
        with torch.no_grad():
            next(sharded.parameters()).mul_(2)
        with pytest.raises(numadist.ShardError, match="a weight has changed after the first call"):
            sharded(inputs())
    else:
        with pytest.raises(numadist.ShardError, match="can be neither changed nor saved"):
            sharded.state_dict()


@pytest.mark.parametrize("dynamic", [False, True], ids=["one-shape", "any-shape"])
def test_packed_weights_are_not_changed_without_a_word(numa_pair, dynamic):
    numa_pair.run(check_packed, dynamic)


def check_halves(rank, world, dynamic):
    import numadist
    from numadist.kernels import half

    shapes = {"x": {0: torch.export.Dim.DYNAMIC}} if dynamic else None
    # Where oneDNN has products in float16, Inductor packs them.
    model, x = Mlp().half().eval(), inputs().half()
    with torch.no_grad():
        wanted = model(x)
    sharded = numadist.shard(model, x, compile=True, dynamic_shapes=shapes)
    for rows in (x, x[:2]) if dynamic else (x,):
        torch.testing.assert_close(sharded(rows), wanted[: len(rows)], rtol=2e-3, atol=2e-3)
    if half.pays(torch.float16):
        assert all(p.dim() == 1 for p in sharded.parameters()), "plain weights are freed"
        with pytest.raises(numadist.ShardError, match="can be neither changed nor saved"):
            sharded.state_dict()


@pytest.mark.parametrize("dynamic", [False, True], ids=["one-shape", "any-shape"])
def test_weights_of_16_bits_are_held_once_and_give_the_same(numa_pair, dynamic):
    numa_pair.run(check_halves, dynamic)


def check_mode(rank, world):
    import numadist

    sharded = numadist.shard(Mlp(dropout=0.1).eval(), inputs())
    with pytest.raises(numadist.ShardError, match="captured in evaluation mode"):
        sharded.train()
    normed = numadist.shard(Mlp(norm=True).eval(), inputs())
    with pytest.raises(numadist.ShardError, match="captured in evaluation mode"):
        normed.train()


def test_a_graph_of_evaluation_mode_is_not_trained(numa_pair):
    numa_pair.run(check_mode)


def check_outside(rank, world):
    import numadist

    table = Table().eval()
    ways = {
        "plain": numadist.shard(table, (ids(),)),
        "compiled": numadist.shard(table, (ids(),), compile=True),
        "trained": numadist.shard(table, (ids(),), train=True),
        "backend": torch.compile(table, backend="numadist"),
    }
    for name, model in ways.items():
        assert name != "plain" or "embed" in str(model.schema.to_json()), "the table is split"
        with torch.no_grad():
            torch.testing.assert_close(model(ids()), table(ids()), rtol=1e-4, atol=1e-5)
            for outside in (VOCAB, VOCAB + 100, -1):
                # Inductor's code, which is what torch.compile runs, says it with an error of its own.
                with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
                    model(torch.tensor([[0, 3, 300, outside]]))


def test_a_token_outside_the_table_is_an_index_error_in_every_path(numa_pair):
    numa_pair.run(check_outside)


def check_backend(rank, world):
    import numadist

    model = Mlp(norm=True).eval()
    compiled = torch.compile(model, backend="numadist")
    changes = [
        lambda: None,
        lambda: [p.mul_(1.5) for p in model.parameters()],
        lambda: model.load_state_dict({n: t + 0.1 for n, t in model.state_dict().items()}),
        lambda: setattr(model.up, "weight", nn.Parameter(model.up.weight.detach() * 2)),
        lambda: setattr(model.down.weight, "data", model.down.weight.detach() * 0.5),
        lambda: model.norm.running_mean.add_(1.0),
    ]
    for number, change in enumerate(changes):
        with torch.no_grad():
            change()
            torch.testing.assert_close(
                compiled(inputs()), model(inputs()), rtol=1e-4, atol=1e-4, msg=lambda m, n=number: f"{n}: {m}"
            )
    with pytest.raises(numadist.ShardError, match="is for inference and has no backward"):
        compiled(inputs()).sum().backward()


def test_the_dynamo_backend_has_the_weights_of_now_and_says_that_it_has_no_backward(numa_pair):
    numa_pair.run(check_backend)


class Remembers(Mlp):
    """Keeps tensors of its last call, as some rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.last, self.seen, self.by_name = torch.zeros(1), [], {"x": torch.ones(2)}

    def forward(self, x):
        self.last = x * 2
        self.seen.append(self.last)
        self.by_name["x"] = self.last
        self.added = self.last
        return super().forward(x)


def check_unchanged(rank, world):
    import numadist

    model = Remembers().eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    last, x = model.last, model.by_name["x"]
    numadist.shard(model, inputs())
    assert model.last is last
    assert (model.seen, model.by_name, hasattr(model, "added")) == ([], {"x": x}, False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_callers_model_is_as_before(numa_pair):
    numa_pair.run(check_unchanged)
