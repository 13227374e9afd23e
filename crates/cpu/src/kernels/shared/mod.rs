//! Scores and what they need, which depends on neither softmax nor values: the rows of a task, packing, products of tiles.

pub(crate) mod codes;
pub(crate) mod gemm;
pub(crate) mod loops;
pub(crate) mod mask;
pub(crate) mod mat;
pub(crate) mod matrix_unit;
pub(crate) mod operands;
pub(crate) mod pack;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "other targets have no instructions for most products")
)]
pub(crate) mod products;
pub(crate) mod scale;
pub(crate) mod score_task;
pub(crate) mod scores;
pub(crate) mod scoring;
pub(crate) mod stream;
pub(crate) mod threads;
pub(crate) mod values;
