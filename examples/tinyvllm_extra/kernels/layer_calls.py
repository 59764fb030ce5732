"""Traces one layer for all equal layers, because tracing takes longer than compiling."""
from tinygrad import Tensor, UOp, function, helpers, nn
from tinygrad.uop.ops import Ops

from tinyvllm.llama import Layer


def flatten(x: Tensor) -> Tensor:
  """Flatten x into its own buffer. A traced function can return a kernel's output without a copy."""
  if x.uop.op is not Ops.AFTER: return x.flatten().contiguous()
  return Tensor(x.uop.src[0].base.after(x.uop.src[1]))


@function(precompile=True, allow_implicit=True)
def call_layer(layer: Layer, x: Tensor, delta: Tensor, cache: list[Tensor], ropes: list[Tensor], tokens: Tensor,
               block_tables: Tensor) -> tuple[Tensor, Tensor]:
  """Call a layer with flat inputs and outputs."""
  hidden = layer.config.hidden_size
  x, delta = layer(x.reshape(-1, hidden), delta.reshape(-1, hidden), cache, ropes, tokens, block_tables)
  return flatten(x), flatten(delta)


def run_layers(layers: list[Layer], x: Tensor, delta: Tensor, caches: list[list[Tensor]], ropes: list[Tensor],
               tokens: Tensor, block_tables: Tensor) -> tuple[Tensor, Tensor]:
  """Like Backend.run_layers. Reuses the traced call of the first equal layer, with this layer's tensors."""
  hidden = x.shape[1]
  x, delta = flatten(x), flatten(delta)
  calls: dict[tuple, UOp] = {}
  for layer, cache in zip(layers, caches, strict=True):
    arguments = layer, x, delta, cache, ropes, tokens, block_tables
    buffers = helpers.dedup([t.uop for t in nn.state.get_parameters(arguments)])   # in the order of the call's inputs
    key = type(layer), getattr(layer, "options", ()), *[(t.shape, t.dtype) for t in buffers]   # see VariantLayer
    if key not in calls:
      calls[key] = call_layer(*arguments)[0].uop.src[0]
      assert calls[key].src[1:len(buffers) + 1] == (*buffers,), "the inputs of a call are in another order"
    body, *sources = calls[key].src
    call = calls[key].replace(src=(body, *buffers, *sources[len(buffers):]))   # scratch buffers follow
    x, delta = [Tensor(call.gettuple(i)) for i in range(2)]
  return x.reshape(-1, hidden), delta.reshape(-1, hidden)
