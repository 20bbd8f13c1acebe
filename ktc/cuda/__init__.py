"""The CUDA lane: everything but the routed experts on a GPU, the decode step as one CUDA graph.

| file | what it does |
|---|---|
| device.py | which device a plan wants, and whether this machine has it |
| experts.py | staging and the `submit` / `collect` of each MoE layer, over runtime/src/cuda |
| hot.py | the most used experts of each layer, computed on the device in decode steps |
| linear.py, mla.py | dense linears and absorbed latent attention on the device |
| paged.py | attention of decode steps by FlashInfer, where it can be used |
| build.py | plan + weights -> a Hugging Face model on the device |
| cache.py | static key/value cache and masks, with the position as data |
| session.py | prefill, decode, capture and replay |

Importing this package imports neither torch nor transformers, and nothing here needs CUDA to be imported.
"""
