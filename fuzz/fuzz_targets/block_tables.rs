//! Any block tables: refused by `validate` and by a run alike, or attended to as a copy of their tokens into plain tensors is.

#![no_main]

use flashtile::cache::{CsrTables, NO_PAGE};
use flashtile::{
    BlockTables, Cpu, Dims, Dtype, HeadShape, Inputs, Outputs, PlanOptions, Problem, ProblemDesc, QOffset,
    SeqLens, TensorView, TensorViewMut, Visibility,
};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

const DIM: usize = 4;
const HEADS: usize = 2;

/// Longer sequences are validated, not planned: a plan lists every task, and prefixes are compared block by block.
const MAX_LEN: usize = 64;

/// Two kernels may round differently.
const TOLERANCE: f32 = 1e-5;

/// Mostly a small number.
fn number(u: &mut Unstructured<'_>, most: usize) -> Result<usize> {
    if u.ratio(1, 32)? { u.arbitrary() } else { u.int_in_range(0..=most) }
}

fn list<T>(
    u: &mut Unstructured<'_>,
    len: usize,
    item: impl Fn(&mut Unstructured<'_>) -> Result<T>,
) -> Result<Vec<T>> {
    (0..len.min(64)).map(|_| item(u)).collect()
}

fn page(u: &mut Unstructured<'_>) -> Result<u32> {
    Ok(if u.ratio(1, 16)? { NO_PAGE } else { number(u, 5)? as u32 })
}

/// Tables whose fields need not agree.
fn tables(u: &mut Unstructured<'_>) -> Result<BlockTables> {
    let sequences = u.int_in_range(0..=4usize)?;
    let (width, page_size) = (number(u, 4)?, number(u, 4)?);
    let entries = if u.ratio(1, 16)? { number(u, 16)? } else { sequences.saturating_mul(width) };
    let lens = list(u, sequences, |u| number(u, 12))?;
    let listed = if u.ratio(1, 16)? { number(u, 4)? } else { sequences };
    let first = match u.ratio(1, 2)? {
        true => vec![0; listed.min(64)],
        false => list(u, listed, |u| number(u, 9))?,
    };
    let table = list(u, entries, page)?;
    Ok(BlockTables { table, width, page_size, wraps: u.arbitrary()?, lens, first })
}

/// Tables made of lists are as good as their lists.
fn constructors(u: &mut Unstructured<'_>) -> Result<()> {
    let (sequences, page_size) = (u.int_in_range(0..=3)?, number(u, 4)?);
    let indptr = list(u, sequences + 1, |u| number(u, 6))?;
    let indices = list(u, 6, page)?;
    let last_page_len = list(u, sequences, |u| number(u, 4))?;
    let csr = CsrTables { indptr: &indptr, indices: &indices, last_page_len: &last_page_len, page_size };
    let lens = list(u, sequences, |u| number(u, 12))?;
    let made = [BlockTables::from_csr(csr), BlockTables::from_rows(&indices, &lens, page_size)];
    for tables in made.into_iter().flatten() {
        assert_eq!(tables.table.len(), tables.width * tables.sequences());
        check(&tables, 6);
    }
    Ok(())
}

/// Every kept token of valid tables lies in a page of the pool.
fn check(tables: &BlockTables, pages: usize) -> bool {
    let is_valid = tables.validate(pages).is_ok();
    for sequence in 0..=tables.sequences() {
        for position in (0..MAX_LEN).chain([usize::MAX]) {
            let found = tables.locate(sequence, position);
            let bounds = tables.first.get(sequence).zip(tables.lens.get(sequence));
            let is_kept = bounds.is_some_and(|(first, len)| (first..len).contains(&&position));
            assert!(is_kept || found.is_none(), "{sequence}, {position}: {found:?} of {tables:?}");
            if is_valid && is_kept {
                let within = found.is_some_and(|(page, row)| page < pages && row < tables.page_size);
                assert!(within, "{sequence}, {position}: {found:?} of {tables:?}");
            }
        }
    }
    is_valid
}

/// An element of a row in the pool, or of a query.
fn element(row: usize, head: usize, dim: usize) -> f32 {
    ((row * 37 + head * 11 + dim * 5) % 23) as f32 / 8.0 - 1.3
}

/// Keys or values of pages: NaN where no sequence keeps a token.
fn pool(tables: &BlockTables, pages: usize, head: usize) -> Vec<f32> {
    let mut pool = vec![f32::NAN; pages * tables.page_size * DIM];
    for (sequence, (&first, &len)) in tables.first.iter().zip(&tables.lens).enumerate() {
        for (page, row) in (first..len).filter_map(|position| tables.locate(sequence, position)) {
            let row = page * tables.page_size + row;
            if let Some(elements) = pool.get_mut(row * DIM..(row + 1) * DIM) {
                elements.iter_mut().enumerate().for_each(|(dim, x)| *x = element(row, head, dim));
            }
        }
    }
    pool
}

fn attend(cpu: &Cpu, problem: &Problem, inputs: &Inputs<'_>) -> std::result::Result<Vec<f32>, String> {
    let plan = cpu.plan(problem, PlanOptions::default()).map_err(|e| e.to_string())?;
    let shape = problem.dims().out_shape();
    let mut out = vec![f32::NAN; shape.iter().product()];
    let view = TensorViewMut::bhsd::<f32>(&mut out, shape).map_err(|e| e.to_string())?;
    cpu.run(&plan, inputs, &mut Outputs::new(view), &mut plan.workspace()).map_err(|e| e.to_string())?;
    Ok(out)
}

/// Attention of one sequence over a copy of its kept tokens.
fn copied(cpu: &Cpu, tables: &BlockTables, sequence: usize, q: &[f32], desc: &ProblemDesc) -> Vec<f32> {
    let (first, len) = (tables.first[sequence], tables.lens[sequence]);
    let gathered = |head: usize| -> Vec<f32> {
        let places = (first..len).filter_map(|position| tables.locate(sequence, position));
        places
            .flat_map(|(page, row)| (0..DIM).map(move |dim| (page * tables.page_size + row, dim)))
            .map(|(row, dim)| element(row, head, dim))
            .collect()
    };
    let (k, v) = (gathered(0), gathered(1));
    let q_len = q.len() / (HEADS * DIM);
    let dims = Dims {
        batch: 1,
        q_heads: HEADS,
        kv_heads: 1,
        q_len,
        kv_len: len - first,
        head_dim: DIM,
        value_dim: DIM,
    };
    let mut plain = ProblemDesc::new(dims, Dtype::F32);
    (plain.visibility, plain.q_offset) = (desc.visibility, Some(QOffset::BottomRight));
    let problem = plain.clone().validate().unwrap_or_else(|e| panic!("{plain:?}: {e}"));
    let view = |x, shape| TensorView::bhsd::<f32>(x, shape).unwrap_or_else(|e| panic!("{e}"));
    let inputs = Inputs::new(view(q, dims.q_shape()), view(&k, dims.k_shape()), view(&v, dims.v_shape()));
    attend(cpu, &problem, &inputs).unwrap_or_else(|e| panic!("{plain:?}: {e}"))
}

fn attention(u: &mut Unstructured<'_>, tables: &BlockTables, pages: usize, is_valid: bool) -> Result<()> {
    let lens =
        tables.lens.iter().map(|&kv_len| Ok(SeqLens { q_len: u.int_in_range(0..=kv_len.min(3))?, kv_len }));
    let lens = lens.collect::<Result<Vec<_>>>()?;
    let heads = HeadShape { q_heads: HEADS, kv_heads: 1, head_dim: DIM, value_dim: DIM };
    let mut desc = ProblemDesc::cached(heads, Dtype::F32, &lens);
    desc.visibility = match u.int_in_range(0..=2u8)? {
        0 => Visibility::causal(),
        1 => Visibility::full(),
        _ => Visibility::window(Some(u.int_in_range(0..=5)?), Some(u.int_in_range(0..=1)?)),
    };
    if u.arbitrary()? {
        desc.prefixes = tables.shared_prefixes(u.int_in_range(0..=3)?);
    }
    let problem = match desc.clone().validate() {
        Ok(problem) => problem,
        Err(e) => {
            // Prefixes of valid tables are no reason.
            desc.prefixes.clear();
            assert!(!is_valid || desc.validate().is_err(), "{tables:?}: {e}");
            return Ok(());
        }
    };
    let total = problem.dims().q_len;
    let q: Vec<f32> = (0..HEADS * total * DIM).map(|n| element(n / DIM, 2, n % DIM)).collect();
    let (k, v) = (pool(tables, pages, 0), pool(tables, pages, 1));
    let shape = [pages, 1, tables.page_size, DIM];
    let view = |x, shape| TensorView::bhsd::<f32>(x, shape).unwrap_or_else(|e| panic!("{e}"));
    let inputs = Inputs::paged(view(&q, problem.dims().q_shape()), view(&k, shape), view(&v, shape), tables);
    let cpu = Cpu::new().with_threads(1);
    let out = match attend(&cpu, &problem, &inputs) {
        Ok(out) => out,
        // Valid tables may have dropped tokens that a query sees.
        Err(_) => return Ok(()),
    };
    assert!(is_valid, "{tables:?} ran");
    let mut start = 0;
    for (sequence, SeqLens { q_len, .. }) in lens.into_iter().enumerate() {
        let rows = |x: &[f32]| -> Vec<f32> {
            (0..HEADS).flat_map(|head| x[(head * total + start) * DIM..][..q_len * DIM].to_vec()).collect()
        };
        let (got, want) = (rows(&out), copied(&cpu, tables, sequence, &rows(&q), problem.desc()));
        for (got, want) in got.into_iter().zip(want) {
            assert!(
                (got - want).abs() <= TOLERANCE,
                "sequence {sequence}: {got}, {want}: {problem:?}, {tables:?}"
            );
        }
        start += q_len;
    }
    Ok(())
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    constructors(u)?;
    let (tables, pages) = (tables(u)?, u.int_in_range(0..=6)?);
    let is_valid = check(&tables, pages);
    // Lengths beyond the table cost no time.
    let _ = tables.shared_prefixes(1);
    if tables.lens.iter().all(|&len| len <= MAX_LEN) && tables.page_size <= MAX_LEN {
        attention(u, &tables, pages, is_valid)?;
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    // Too few bytes end a problem early.
    let _ = run(&mut Unstructured::new(data));
});
