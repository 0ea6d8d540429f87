"""`--external_plugins` on CPU with several processes: makes deepspeed's process group before the model loads.

ZeRO-3 partitions while the model is built, so the group has to exist before. Deepspeed's gloo path compiles `deepspeed_shm_comm` with a C++
compiler and raises where there is none; marked as incompatible it is left alone, and gloo alone does the work.
"""

import os

import deepspeed.ops

if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
