//! Reads past the end of the tensor that `FLASHTILE_READ` names (`q`, `k`, `v`, `out`, `mask`, `bytes`, `slopes`,
//! `sinks` or `lse`): one byte; for `+q` and so on, the aligned word that contains the end; for `-q` and so on, one
//! byte before the start. Without the variable, it reads the first and last byte of each, which is valid.
//!
//! A separate program for `tests/memory.sh`: a memory checker that misses such reads proves nothing about the
//! kernels.

#![allow(unsafe_code, clippy::unwrap_used, clippy::panic)]

use flashtile::{Dtype, MaskKind};
use flashtile_testkit::{Case, Guarded, GuardedList, GuardedMask, MaskFill, Placement};
use std::hint::black_box;
use std::ops::Range;

fn list(list: &GuardedList) -> Range<*const u8> {
    let Range { start, end } = list.slice().as_ptr_range();
    start.cast()..end.cast()
}

fn main() {
    let asked = std::env::var("FLASHTILE_READ").unwrap_or_default();
    let name = asked.trim_start_matches(['-', '+']);
    let (before, word) = (asked.starts_with('-'), asked.starts_with('+'));
    // Sizes that do not end with a word. A tensor is at the start of its allocation only if a read before it is
    // asked for.
    let placement = Placement::Exact { lead: if before { 0 } else { 6 } };
    let mut case = Case::new("overread", [1, 3, 3, 5, 7, 9, 11], Dtype::F16).alibi().sinks();
    case = case.at(flashtile::QOffset::TopLeft).mask(MaskKind::Additive(Dtype::BF16), "", MaskFill::Random);
    case.placement = placement;
    let built = case.build().unwrap();
    let bytes = GuardedMask::placed(MaskKind::Bool, [1, 1, 5, 7], (case.layout, placement), |_| 0.0);
    let out = Guarded::placed(Dtype::F16, [1, 3, 5, 11], case.layout, placement);
    let lse = GuardedList::placed(15, placement);
    let memory = [
        ("q", built.q.addresses()),
        ("k", built.k.addresses()),
        ("v", built.v.addresses()),
        ("out", out.addresses()),
        ("mask", built.mask.as_ref().unwrap().addresses()),
        ("bytes", bytes.addresses()),
        ("slopes", list(built.alibi_slopes.as_ref().unwrap())),
        ("sinks", list(built.sinks.as_ref().unwrap())),
        ("lse", list(&lse)),
    ];
    assert!(asked.is_empty() || memory.iter().any(|(known, _)| *known == name), "no tensor {name}");
    for (tensor, Range { start, end }) in memory {
        let (mut first, mut last) = (start, end.wrapping_sub(1));
        match tensor == name {
            true if before => first = start.wrapping_sub(1),
            true if word => {
                let aligned = end.wrapping_sub(end as usize % 8);
                assert!(aligned < end, "{tensor} ends with a word");
                // SAFETY: some bytes of the word belong to the tensor; reading the others is the fault asked for.
                black_box(unsafe { aligned.cast::<u64>().read_volatile() });
            }
            true => last = end,
            false => {}
        }
        // Used, since valgrind drops a load whose value is unused before it checks the address.
        // SAFETY: both bytes belong to the tensor, unless a fault is asked for.
        black_box(unsafe { [first.read_volatile(), last.read_volatile()] });
    }
}
