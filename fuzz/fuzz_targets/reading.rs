//! Any bytes as the input file of `flashtile run`: refused with one line, or computed; nothing panics.
//!
//! Modules of the command line name each other from their crate's root: a target has `use reading::*` there.

#[path = "../../cli/src/buffer.rs"]
pub(crate) mod buffer;
#[path = "../../cli/src/escape.rs"]
pub(crate) mod escape;
#[path = "../../cli/src/failure.rs"]
pub(crate) mod failure;
#[path = "../../cli/src/input.rs"]
pub(crate) mod input;
#[path = "../../cli/src/names.rs"]
pub(crate) mod names;
#[path = "../../cli/src/nearest.rs"]
pub(crate) mod nearest;
#[path = "../../cli/src/numpy.rs"]
pub(crate) mod numpy;
#[path = "../../cli/src/operands.rs"]
pub(crate) mod operands;
#[path = "../../cli/src/options.rs"]
pub(crate) mod options;
#[path = "../../cli/src/parse.rs"]
pub(crate) mod parse;
#[path = "../../cli/src/report.rs"]
pub(crate) mod report;

use buffer::Buffer;
use flashtile::{Cpu, Dtype, Outputs, PlanOptions, QOffset, TensorViewMut, Visibility};
use input::Mapped;
use operands::Operands;
use options::{Layout, Reading, Semantics};
use std::io::Write;

/// Larger problems are parsed and planned, not computed.
const MAX_FLOPS: f64 = 1e7;
/// Planning lists every task.
const MAX_ROWS: usize = 1 << 20;

fn semantics() -> [(Reading, Semantics); 4] {
    let semantics =
        |causal, q_offset, window| Semantics { causal, q_offset, window, scale: None, softcap: None };
    [
        (Reading { layout: None, prefix: None, dtype: None }, semantics(false, None, None)),
        (
            Reading { layout: Some(Layout::Bshd), prefix: None, dtype: Some(Dtype::F16) },
            semantics(true, Some(QOffset::BottomRight), None),
        ),
        (
            Reading { layout: None, prefix: None, dtype: Some(Dtype::BF16) },
            semantics(true, Some(QOffset::TopLeft), Some(Visibility::window(Some(2), None))),
        ),
        (Reading { layout: None, prefix: Some("a".to_owned()), dtype: None }, semantics(false, None, None)),
    ]
}

fn compute(operands: &Operands<'_>) -> failure::Result<()> {
    let problem = &operands.problem;
    let dims = problem.dims();
    let inputs = operands.inputs()?;
    let rows = dims.batch.saturating_mul(dims.q_heads).saturating_mul(dims.q_len);
    if rows > MAX_ROWS {
        return Ok(());
    }
    let cpu = Cpu::new();
    let plan = cpu.plan(problem, PlanOptions::default()).map_err(failure::Failure::new)?;
    if problem.flops() > MAX_FLOPS || plan.workspace_bytes() > 64 << 20 || rows * dims.value_dim > MAX_ROWS {
        return Ok(());
    }
    let mut out = Buffer::elements(problem.dtype(), rows * dims.value_dim)?;
    let strides = operands.order.strides(dims.out_shape());
    let out = TensorViewMut::from_bytes(problem.dtype(), out.bytes_mut(), dims.out_shape(), strides);
    let mut outputs = Outputs::new(out.map_err(failure::Failure::new)?);
    cpu.run(&plan, &inputs, &mut outputs, &mut plan.workspace()).map_err(failure::Failure::new)
}

/// Reads a file with these bytes, and computes where it is a small problem.
pub(crate) fn read(data: &[u8]) {
    let mut file = tempfile::NamedTempFile::new().unwrap_or_else(|e| panic!("{e}"));
    file.write_all(data).unwrap_or_else(|e| panic!("{e}"));
    for (reading, semantics) in semantics() {
        let read = || {
            let mapped = Mapped::open(file.path())?;
            let archive = names::archive(&mapped, reading.prefix.as_deref())?;
            compute(&Operands::read(&archive, &reading, &semantics)?)
        };
        if let Err(failure) = read() {
            let line = failure.to_string();
            assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
        }
    }
}
