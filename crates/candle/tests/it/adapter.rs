//! The adapter of the example, as a user could write it.

#[path = "../../examples/adapter.rs"]
#[allow(dead_code, unreachable_pub)]
mod example;

use crate::{random, same, swap};
use candle_core::{DType, Result};

#[test]
fn answers_are_those_of_the_crate() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let [q, k, v] = [([2, 9, 4, 32], 1), ([2, 30, 2, 32], 2), ([2, 30, 2, 32], 3)]
            .map(|(shape, seed)| random(&shape, seed).to_dtype(dtype).unwrap());
        for causal in [false, true] {
            let ours = flashtile_candle::flash_attn(&q, &k, &v, 0.2, causal)?;
            assert!(same(&example::flash_attn(&q, &k, &v, 0.2, causal)?, &ours));
            let mask = random(&[2, 4, 9, 30], 4).to_dtype(dtype)?;
            let [q, k, v] = [&q, &k, &v].map(swap);
            for (mask, cap) in [(None, 1.0), (Some(&mask), 1.0), (Some(&mask), 2.0)] {
                let ours = flashtile_candle::sdpa(&q, &k, &v, mask, causal, 0.2, cap)?;
                assert!(same(&example::sdpa(&q, &k, &v, mask, causal, 0.2, cap)?, &ours));
            }
        }
    }
    Ok(())
}

/// Programs may copy the example: it has at most 40 lines of code.
#[test]
fn the_adapter_is_short() {
    let source = include_str!("../../examples/adapter.rs");
    let lines =
        source.lines().skip_while(|line| *line != "// adapter {").take_while(|line| *line != "// adapter }");
    let code = lines.filter(|line| !line.trim().is_empty() && !line.trim().starts_with("//")).count();
    assert!((20..=40).contains(&code), "{code} lines");
}
