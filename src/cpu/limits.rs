//! What this machine can do at most: the rates against which kernels are judged.
