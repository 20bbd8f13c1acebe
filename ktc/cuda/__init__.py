"""The CUDA lane: everything but the routed experts on GPUs, the decode step as one CUDA graph on each.

| file | what it does |
|---|---|
| device.py | which devices a plan wants, and whether this machine has them |
| experts.py | the `submit` / `collect` of each MoE layer, over runtime/src/cuda |
| side.py | one device's streams and staging buffers |
| pipeline.py | layers on several devices: what is copied from stage to stage |
| hot.py | the most used experts of each layer, computed on the device in decode steps |
| linear.py, mla.py | dense linears and absorbed latent attention on the device |
| paged.py | attention of decode steps by FlashInfer, where it can be used |
| build.py | plan + weights -> a Hugging Face model on its devices |
| cache.py | static key/value cache and masks, with the position as data |
| host_cache.py | caches of some layers in pinned host memory |
| graphs.py | the decode step as one captured graph per stage |
| session.py | prefill, decode, capture and replay |

Importing this package imports neither torch nor transformers, and nothing here needs CUDA to be imported.
"""
