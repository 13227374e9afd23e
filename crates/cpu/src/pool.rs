//! The rayon pool in which a call computes.

use rayon::ThreadPoolBuilder;
use std::error::Error;
use std::sync::OnceLock;

/// Number of threads of the current pool. Outside of any other pool, this is the global pool, which the first call starts unless the
/// program did: rayon panics if it has to start the pool itself and cannot. The error is the system's message.
pub(crate) fn threads() -> Result<usize, &'static str> {
    static REASON: OnceLock<Option<String>> = OnceLock::new();
    if rayon::current_thread_index().is_none() && !cfg!(target_family = "wasm") {
        let reason = REASON.get_or_init(|| match ThreadPoolBuilder::new().build_global() {
            // The error for a pool that the program has started has no source.
            Err(error) if error.source().is_some() => Some(error.to_string()),
            Ok(()) | Err(_) => None,
        });
        if let Some(reason) = reason {
            return Err(reason);
        }
    }
    Ok(rayon::current_num_threads())
}

#[cfg(test)]
mod tests {
    use crate::cpu::Cpu;
    use crate::merge::{AttentionState, MergeError, merge};
    use flashtile_core::dtype::Dtype;
    use flashtile_core::inputs::{Inputs, Outputs, RunError};
    use flashtile_core::plan::PlanOptions;
    use flashtile_core::problem::{Dims, ProblemDesc};
    use flashtile_core::tensor::{TensorView, TensorViewMut};

    /// Set in the process whose threads cannot start.
    const CHILD: &str = "FLASHTILE_TEST_NO_THREADS";

    #[test]
    fn threads_that_cannot_start_are_an_error() {
        if std::env::var_os(CHILD).is_some() {
            return refused();
        }
        // A pool cannot start twice, so a separate process tries, with stacks for which there is no memory.
        let name = "pool::tests::threads_that_cannot_start_are_an_error";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--test-threads=1", "--nocapture"])
            .envs([(CHILD, "1"), ("RUST_MIN_STACK", "70368744177664"), ("RAYON_NUM_THREADS", "2")])
            .output()
            .unwrap();
        let text = [child.stdout, child.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(child.status.success() && text.contains("1 passed") && !text.contains("panicked"), "{text}");
    }

    fn refused() {
        let reason = Cpu::pool_threads().unwrap_err().to_string();
        assert!(reason.starts_with("the threads of the pool cannot start: "), "{reason}");
        let shape = [1, 8, 64, 16];
        let x = vec![0.5f32; 8 * 64 * 16];
        let mut out = x.clone();
        let x = TensorView::bhsd(&x, shape).unwrap();
        let dims =
            Dims { batch: 1, q_heads: 8, kv_heads: 8, q_len: 64, kv_len: 64, head_dim: 16, value_dim: 16 };
        let problem = ProblemDesc::new(dims, Dtype::F32).validate().unwrap();
        let inputs = Inputs::new(x, x, x);
        let cpu = Cpu::new().with_threads(4);
        let plan = cpu.plan(&problem, PlanOptions::default()).unwrap();
        assert!(plan.workers() > 1);
        let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, shape).unwrap());
        let ran = cpu.run(&plan, &inputs, &mut outputs, &mut plan.workspace());
        assert!(matches!(ran, Err(RunError::Threads { .. })), "{ran:?}");
        let lse = [0.0; 8 * 64];
        let merged = merge(&[AttentionState { out: x, lse: &lse }], &mut outputs);
        assert!(matches!(merged, Err(MergeError::Threads { .. })), "{merged:?}");
    }
}
