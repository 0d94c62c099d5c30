"""Operations on lists of tensors: one kernel on a device, one call on the host.

Documented and used by all of torch's optimizers, but their names begin with an underscore (2.11 to 2.13).
"""

import torch

copy_ = torch._foreach_copy_
div_ = torch._foreach_div_
mul_ = torch._foreach_mul_
lerp_ = torch._foreach_lerp_
norm = torch._foreach_norm
