"""`--external_plugins` on CPU: common beginnings are passed once, and several processes get their group before the model loads.

ZeRO-3 partitions while the model is built, so the group has to exist before. Deepspeed's gloo path compiles `deepspeed_shm_comm` with a C++
compiler and raises where there is none; marked as incompatible it is left alone, and gloo alone does the work.
"""

import os

from training.shared_prefix import in_training

in_training()

if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
