"""The Llama of `models`, whose layers give gradients of weights in float32."""

from benchmarks.grid.float32_layers import changed_model_file

_file = changed_model_file("llama")
RECIPES, build, annotate = _file.recipes, _file.build, _file.annotate
loss_fn, data, flops = _file.loss_fn, _file.data, _file.flops
