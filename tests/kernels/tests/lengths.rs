//! Every number of keys up to several tiles. Rows behind the last key in its page or batch entry must not be
//! read, and are NaN.

use crate::support::{PREFILL, TILE, all_pass, runner};
use flashtile::{Codec, Dtype, QOffset::BottomRight};
use flashtile_testkit::{Case, Keep};
use std::ops::RangeInclusive;

const KEYS: RangeInclusive<usize> = 1..=200;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Rows of a page.
const PAGES: [usize; 7] = [1, 3, 7, 16, 31, 33, 64];

/// Number of queries: one, or several, of which the first see no key if there are few.
fn queries(keys: usize) -> [usize; 2] {
    [1, [2, 3, 5, 9, 31][keys % 5]]
}

/// Key counts near tile boundaries: a tile has 16 keys, the two SIMD groups of a split have 32, both splits 64.
fn edges() -> impl Iterator<Item = usize> {
    KEYS.filter(|keys| *keys <= 20 || (keys + 2) % 16 <= 3 && (*keys <= 68 || *keys > 120))
}

/// A case for each number of keys and each of two numbers of queries, which sit at the last keys.
fn each(keys: impl Iterator<Item = usize>, case: impl Fn(&str, usize, usize) -> Case) -> Vec<Case> {
    let of = |keys: usize| queries(keys).map(|queries| case(&format!("{queries}_of_{keys}"), queries, keys));
    keys.flat_map(of).map(|case| case.causal(BottomRight)).collect()
}

#[test]
fn of_elements() {
    let cases = each(KEYS, |name, queries, keys| {
        let dims = [1, 2, 1, queries, keys + 1 + keys % 40, 64, 64];
        Case::new(format!("elements_{name}"), dims, DTYPES[keys % 3]).kv_lens(&[keys])
    });
    all_pass(&cases, &runner(TILE));
    all_pass(&cases, &runner(PREFILL));
}

#[test]
fn of_elements_in_pages() {
    let cases = each(KEYS, |name, queries, keys| {
        let case = Case::new(format!("paged_{name}"), [1, 2, 1, 0, 0, 64, 64], DTYPES[keys % 3]);
        case.cached(&[(queries, keys), (1, 2 * PAGES[keys % 7])], PAGES[keys % 7], Keep::All)
    });
    all_pass(&cases, &runner(TILE));
    all_pass(&cases, &runner(PREFILL));
}

fn codes(name: &str, lengths: &[(usize, usize)], page: usize) -> Case {
    let case = Case::new(name, [1, 2, 1, 0, 0, 64, 64], Dtype::BF16);
    case.stored(Codec::Tq5, Codec::Tq5).cached(lengths, page, Keep::All)
}

fn codes_pass(lengths: impl Iterator<Item = usize>) {
    let cases = each(lengths, |name, queries, keys| codes(name, &[(queries, keys)], keys + 1 + keys % 40));
    all_pass(&cases, &runner(TILE).padded());
}

fn codes_in_pages_pass(lengths: impl Iterator<Item = usize>) {
    let cases = each(lengths, |name, queries, keys| {
        // The second sequence has two pages, so that a block table is needed.
        let page = PAGES[keys % 7];
        codes(&format!("paged_{name}"), &[(queries, keys), (1, 2 * page)], page)
    });
    all_pass(&cases, &runner(TILE));
}

#[test]
fn of_codes() {
    codes_pass(edges());
}

#[test]
#[ignore = "takes half a minute"]
fn of_codes_of_every_length() {
    codes_pass(KEYS);
}

#[test]
fn of_codes_in_pages() {
    codes_in_pages_pass(edges());
}

#[test]
#[ignore = "takes half a minute"]
fn of_codes_in_pages_of_every_length() {
    codes_in_pages_pass(KEYS);
}
