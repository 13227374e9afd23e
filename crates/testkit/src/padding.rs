//! Bytes of keys and values that belong to no token: kernels must not read them.

use flashtile_core::codec::KvView;
use flashtile_core::inputs::Inputs;
use flashtile_core::problem::{Problem, Sequence};
use std::collections::HashSet;
use std::ops::Range;

/// Batch entries or pages, and their rows, that hold a token.
pub(crate) fn held(problem: &Problem, inputs: &Inputs<'_>) -> HashSet<(usize, usize)> {
    let place = |index: usize, s: &Sequence, position: usize| match inputs.tables {
        Some(tables) => tables.locate(index, position),
        None => Some((s.batch, s.kv_start + position)),
    };
    let sequences = problem.sequences().iter().enumerate();
    sequences.flat_map(|(index, s)| (0..s.kv_len).filter_map(move |at| place(index, s, at))).collect()
}

/// The byte ranges of keys or values, with these strides, that belong to no token.
pub(crate) fn padding(
    view: &KvView<'_>,
    strides: [usize; 3],
    held: &HashSet<(usize, usize)>,
) -> Vec<Range<usize>> {
    let [entries, heads, rows, dim] = view.shape();
    let mut bytes = Vec::new();
    for (entry, head) in (0..entries).flat_map(|entry| (0..heads).map(move |head| (entry, head))) {
        let start = entry * strides[0] + head * strides[1];
        let unused = (0..rows).filter(|row| !held.contains(&(entry, *row)));
        match view {
            KvView::Elements(view) => bytes.extend(unused.map(|row| {
                let at = start + row * strides[2];
                at..at + dim * view.dtype().bytes()
            })),
            KvView::Codes(codes) => {
                for place in unused.flat_map(|row| codes.coder().format().places(rows, row..row + 1)) {
                    bytes.push(start + place.start..start + place.end);
                }
                bytes.push(start + codes.page(entry, head).len()..start + strides[1]);
            }
        }
    }
    bytes
}
