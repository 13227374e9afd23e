//! x
pub(super) fn run(_plan: &crate::CpuPlan, _inputs: &crate::Inputs<'_>, _outputs: &mut crate::Outputs<'_>, _w: &mut super::Workspace) {}
