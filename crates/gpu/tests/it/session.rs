//! Sessions on the simulator, and on a CUDA device where there is one: plans are kept from call to call, and every call has the oracle's
//! answer.

use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::{CodePages, Codec, KvView, Side};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::inputs::{Inputs, Outputs, RunError};
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Dims, HeadShape, ProblemDesc, QOffset, SeqLens, Visibility};
use flashtile_core::reference;
use flashtile_core::tensor::{MaskView, TensorView, TensorViewMut, ViewError};
use flashtile_gpu::SessionError;
use flashtile_gpu::engine::PortableEngine;
use flashtile_gpu::facts::GpuFacts;
use flashtile_gpu::session::Session;
use flashtile_gpu::simulator::{DECODE_TILE, no_native, session};
use flashtile_gpu::tensors::{GpuInputs, GpuOutputs, GpuTables};
use flashtile_gpu::upload::{Results, Uploaded};
use flashtile_kernel::cuda::Gpu;
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{Device, HostAccess, ScalarType, Span, View};
use flashtile_testkit::Rng;

fn random(rng: &mut Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.normal()).collect()
}

/// Computes on a session what a description says, and compares with the oracle.
fn agrees<D: HostAccess>(session: &mut Session<PortableEngine<D>>, desc: &ProblemDesc, inputs: &Inputs<'_>) {
    let problem = desc.clone().validate().unwrap();
    let shape = problem.dims().out_shape();
    let mut out = vec![f32::NAN; shape.iter().product()];
    let mut lse = vec![f32::NAN; problem.dims().lse_shape().iter().product()];
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, shape).unwrap());
    outputs.lse = Some(&mut lse);
    session.compute(desc, inputs, &mut outputs).unwrap();
    let want = reference::attention(&problem, inputs).unwrap();
    for (got, want) in [(&out, &want.out), (&lse, &want.lse)] {
        for (n, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((f64::from(*got) - want).abs() < 2e-3, "{n} of {desc:?}: {got}, expected {want}");
        }
    }
}

/// A session on the first CUDA device, which holds no less than other devices do.
pub(super) fn on_cuda() -> Option<Session<PortableEngine<Gpu>>> {
    let facts = GpuFacts {
        cores: 40,
        simds_per_core: 32,
        threads_per_group: 1024,
        shared_per_group: 48 << 10,
        shared_per_core: 64 << 10,
        reserved_shared: 1 << 10,
        registers_per_core: 1 << 16,
        registers_per_thread: 256,
        multiplies_f32: false,
        multiplies_bf16: false,
        rereads_in_cache: true,
        max_groups: 65535,
    };
    let gpu = Gpu::new(0).map_err(|why| eprintln!("SKIPPED, nothing ran on a GPU: {why}")).ok()?;
    Some(Session::new(gpu, PortableEngine::new(facts)))
}

#[test]
fn calls_of_several_descriptions_have_their_answers() {
    several_descriptions(&mut session(DECODE_TILE));
    if let Some(mut session) = on_cuda() {
        several_descriptions(&mut session);
    }
}

fn several_descriptions<D: HostAccess>(session: &mut Session<PortableEngine<D>>) {
    let dims = Dims { batch: 2, q_heads: 4, kv_heads: 2, q_len: 3, kv_len: 19, head_dim: 64, value_dim: 64 };
    let mut rng = Rng::new(1);
    let (q, k, v) = (random(&mut rng, 1536), random(&mut rng, 4864), random(&mut rng, 4864));
    // Rows of all heads lie together: strides that are kept on the device.
    let view = |x, [batch, heads, rows, dim]: [usize; 4]| {
        TensorView::bshd(x, [batch, rows, heads, dim]).unwrap_or_else(|why| panic!("{why}"))
    };
    let inputs = Inputs::new(view(&q, dims.q_shape()), view(&k, dims.k_shape()), view(&v, dims.v_shape()));
    let plain = ProblemDesc::new(dims, Dtype::F32);
    let mut causal = plain.clone();
    (causal.visibility, causal.q_offset) = (Visibility::causal(), Some(QOffset::BottomRight));
    let mut soft = plain.clone();
    soft.softcap = Some(2.0);
    for desc in [&plain, &causal, &plain, &soft, &causal] {
        agrees(session, desc, &inputs);
    }
    let mut sinks = inputs;
    let logits = [0.5, -1.0, 2.0, 0.0];
    sinks.sinks = Some(&logits);
    let mut desc = causal;
    desc.sinks = true;
    agrees(session, &desc, &sinks);
    session.clear();
    agrees(session, &desc, &sinks);
}

/// Tables of sequences in pages of 4 tokens.
fn tables(pages: &[&[u32]], lens: &[usize]) -> BlockTables {
    let width = pages.iter().map(|pages| pages.len()).max().unwrap();
    let line = |pages: &&[u32]| {
        let mut line = pages.to_vec();
        line.resize(width, u32::MAX);
        line
    };
    BlockTables {
        table: pages.iter().flat_map(line).collect(),
        width,
        page_size: 4,
        wraps: false,
        lens: lens.to_vec(),
        first: vec![0; lens.len()],
    }
}

#[test]
fn steps_of_decoding_have_the_lengths_and_pages_of_each() {
    several_steps(&mut session(DECODE_TILE));
    if let Some(mut session) = on_cuda() {
        several_steps(&mut session);
    }
}

fn several_steps<D: HostAccess>(session: &mut Session<PortableEngine<D>>) {
    let heads = HeadShape { q_heads: 4, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let mut rng = Rng::new(2);
    let q = random(&mut rng, 2 * 4 * 64);
    let q = TensorView::bhsd(&q, [1, 4, 2, 64]).unwrap();
    let mut pages =
        [Side::Keys, Side::Values].map(|side| CodePages::new(Codec::Int8, side, [9, 2, 4, 64]).unwrap());
    for place in 0..9 * 2 * 4 {
        for pages in &mut pages {
            pages.store([place / 8, place / 4 % 2, place % 4], &random(&mut rng, 64)).unwrap();
        }
    }
    let [k, v] = pages.each_ref().map(|pages| KvView::Codes(pages.view()));
    let steps: [(&[&[u32]], [usize; 2]); 6] = [
        (&[&[3, 1], &[7]], [5, 4]),
        (&[&[3, 1], &[7, 0]], [6, 5]),
        (&[&[3, 1], &[7, 0]], [7, 6]),
        // Other pages of the same lengths, one page each, and more than the first table had.
        (&[&[2, 1], &[8, 0]], [7, 6]),
        (&[&[6], &[4]], [4, 3]),
        (&[&[3, 1, 2, 6], &[7, 0, 5]], [16, 9]),
    ];
    for (pages, lens) in steps {
        let lengths = lens.map(|kv_len| SeqLens { q_len: 1, kv_len });
        let mut desc = ProblemDesc::cached(heads, Dtype::F32, &lengths);
        (desc.k_codec, desc.v_codec) = (Some(Codec::Int8), Some(Codec::Int8));
        let tables = tables(pages, &lens);
        // Twice: a second call finds everything written.
        for _ in 0..2 {
            agrees(session, &desc, &Inputs::paged_kv(q, k, v, &tables));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let dims = Dims { batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, kv_len: 2, head_dim: 64, value_dim: 64 };
    let (x, mut out) = (vec![0.0f32; 128], vec![0.0f32; 64]);
    let (q, kv) =
        (TensorView::bhsd(&x, [1, 1, 1, 64]).unwrap(), TensorView::bhsd(&x, [1, 1, 2, 64]).unwrap());
    let mut compute = |desc: &ProblemDesc, q| {
        let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 1, 1, 64]).unwrap());
        session(DECODE_TILE).compute(desc, &Inputs::new(q, kv, kv), &mut outputs).unwrap_err()
    };
    let desc = ProblemDesc::new(dims, Dtype::F32);
    let got = [1, 1, 2, 64];
    let shape = RunError::Shape { tensor: "q", expected: [1, 1, 1, 64], got };
    assert_eq!(compute(&desc, kv), SessionError::Inputs(shape));
    let mut none = desc.clone();
    none.dims.q_heads = 0;
    assert!(matches!(compute(&none, q), SessionError::Problem(_)));
    // A dimension without native code.
    let (x, mut out) = (vec![0.0f32; 80], vec![0.0f32; 80]);
    let x = TensorView::bhsd(&x, [1, 1, 1, 80]).unwrap();
    let dims = Dims { kv_len: 1, head_dim: 80, value_dim: 80, ..dims };
    let desc = ProblemDesc::new(dims, Dtype::F32);
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 1, 1, 80]).unwrap());
    let refused = session(DECODE_TILE).compute(&desc, &Inputs::new(x, x, x), &mut outputs).unwrap_err();
    let why = no_native(&desc.validate().unwrap());
    assert_eq!(refused, SessionError::Unsupported(Unsupported::Instance { why }));
}

/// A description of cached sequences with everything that has strides, and the tensors for it in the memory of a simulator.
struct Strided {
    desc: ProblemDesc,
    tables: BlockTables,
    uploaded: Uploaded<Memory>,
    results: Results<Memory>,
}

impl Strided {
    fn new(codec: Codec) -> Self {
        let heads = HeadShape { q_heads: 4, kv_heads: 2, head_dim: 64, value_dim: 64 };
        let lens = [(3, 7), (2, 9)].map(|(q_len, kv_len)| SeqLens { q_len, kv_len });
        let mut desc = ProblemDesc::cached(heads, Dtype::F32, &lens);
        (desc.k_codec, desc.v_codec) = (Some(codec), Some(codec));
        (desc.mask, desc.tree) = (Some(MaskKind::Additive(Dtype::F32)), true);
        let tables = tables(&[&[0, 1], &[2, 3, 4]], &[7, 9]);
        let (x, bias, tree) = (vec![0.5f32; 5 * 2 * 4 * 64], vec![0.0f32; 2 * 4 * 3 * 9], vec![true; 5 * 3]);
        let pages = [Side::Keys, Side::Values].map(|side| CodePages::new(codec, side, [5, 2, 4, 64]));
        let q = TensorView::packed(&x[..5 * 4 * 64], [5, 4, 64]).unwrap();
        let elements = TensorView::bhsd(&x, [5, 2, 4, 64]).unwrap();
        let [k, v] = pages.each_ref().map(|pages| match pages {
            Ok(pages) => KvView::Codes(pages.view()),
            Err(_) => KvView::Elements(elements),
        });
        let mut inputs = Inputs::paged_kv(q, k, v, &tables);
        inputs.mask = Some(MaskView::dense_additive(&bias, [2, 4, 3, 9]).unwrap());
        inputs.tree = Some(MaskView::dense_bool(&tree, [1, 1, 5, 3]).unwrap());
        let (device, mut out, mut lse) = (Simulator::new(), vec![0.0f32; 5 * 4 * 64], vec![0.0f32; 20]);
        let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 4, 5, 64]).unwrap());
        outputs.lse = Some(&mut lse);
        let uploaded = Uploaded::new(&device, &inputs).unwrap();
        let results = Results::new(&device, &outputs).unwrap();
        Self { desc, tables, uploaded, results }
    }

    /// Runs with tensors that a function has changed.
    fn run(
        &mut self,
        change: impl FnOnce(&mut GpuInputs<'_, Memory>, &mut GpuOutputs<'_, Memory>),
    ) -> Result<(), SessionError<<Simulator as Device>::Error>> {
        let (mut inputs, mut outputs) = (self.uploaded.inputs(), self.results.outputs());
        change(&mut inputs, &mut outputs);
        session(DECODE_TILE).run_paged(&self.desc, &inputs, &self.tables, &mut outputs)
    }
}

/// A view without its last elements.
fn shorter(view: View<'_, Memory>, by: usize) -> View<'_, Memory> {
    View::new(view.memory(), Span { len: view.len() - by, ..view.span() })
}

#[test]
fn tensors_beyond_their_memory_are_refused() {
    for codec in [Codec::F32, Codec::Int8] {
        let mut strided = Strided::new(codec);
        strided.run(|_, _| ()).unwrap();
        let small =
            |error: &RunError| matches!(error, RunError::Memory { error: ViewError::TooSmall { .. }, .. });
        type Change = fn(&mut GpuInputs<'_, Memory>, &mut GpuOutputs<'_, Memory>);
        let changes: [(&str, Change); 13] = [
            ("q: ", |i, _| i.q.view = shorter(i.q.view, 1)),
            ("q: ", |i, _| i.q.strides[2] += 1),
            // Pages of codes end 8 bytes before they are aligned.
            ("k: ", |i, _| i.k.bytes = shorter(i.k.bytes, 9)),
            ("k: ", |i, _| i.k.strides[0] += 16),
            ("v: ", |i, _| i.v.strides[1] += 1 << 20),
            ("v: ", |i, _| i.v.strides[0] *= 2),
            ("mask: ", |i, _| i.mask.as_mut().unwrap().strides[1] += 40),
            ("mask: ", |i, _| i.mask.as_mut().unwrap().strides[3] += 7),
            ("tree: ", |i, _| i.tree.as_mut().unwrap().strides[2] += 1),
            ("tree: ", |i, _| {
                let tree = i.tree.as_mut().unwrap();
                tree.bytes = shorter(tree.bytes, 1)
            }),
            ("out: ", |_, o| o.out.strides[1] += 1),
            ("out: ", |_, o| o.out.strides[2] *= 9),
            ("mask: ", |i, _| {
                let mask = i.mask.as_mut().unwrap();
                mask.bytes = shorter(mask.bytes, 1)
            }),
        ];
        for (what, change) in changes {
            let refused = strided.run(change).unwrap_err();
            assert!(
                matches!(&refused, SessionError::Inputs(error) if small(error)),
                "{what}{codec}: {refused}"
            );
            assert!(refused.to_string().starts_with(what), "{what}{codec}: {refused}");
        }
        let others: [(&str, Change); 6] = [
            ("q: shape times strides is not addressable", |i, _| i.q.strides[1] = usize::MAX),
            ("q: innermost stride is 2, expected 1", |i, _| i.q.strides = [0, 8, 32, 2]),
            ("k: shape times strides is not addressable", |i, _| i.k.strides[0] = usize::MAX / 2),
            ("out: elements overlap under strides [0, 1, 64, 1]", |_, o| o.out.strides = [0, 1, 64, 1]),
            ("k has an offset or a stride of 2071 bytes, expected a multiple of 2", |i, _| {
                i.k.strides = [0, 2071, 0]
            }),
            ("mask: shape times strides is not addressable", |i, _| {
                i.mask.as_mut().unwrap().strides[0] = usize::MAX
            }),
        ];
        for (why, change) in others {
            if codec == Codec::Int8 || !why.contains("2071") {
                assert_eq!(strided.run(change).unwrap_err().to_string(), why, "{codec}");
            }
        }
        // Tables on the device.
        let words = Simulator::new().zeroed(ScalarType::U32, 5 * 4 * 64).unwrap();
        let long = GpuTables { table: words.view(), width: usize::MAX / 2, page_size: 4, wraps: false };
        let (mut inputs, mut outputs) = (strided.uploaded.inputs(), strided.results.outputs());
        inputs.tables = Some(long);
        let refused = session(DECODE_TILE).run(&strided.desc, &inputs, &mut outputs).unwrap_err();
        let length = RunError::Length { tensor: "tables.table", expected: usize::MAX - 1, got: 5 * 4 * 64 };
        assert_eq!(refused, SessionError::Inputs(length));
    }
}

/// Strides and sizes of any numbers are refused or run: nothing is read or written outside of memory.
#[test]
fn strides_of_any_numbers_do_no_harm() {
    let mut rng = Rng::new(5);
    let (mut refused, mut ran) = (0, 0);
    for round in 0..400 {
        let mut strided = Strided::new([Codec::F32, Codec::Int8, Codec::Tq4][round % 3]);
        let numbers = [0, 1, 2, 3, 8, 16, 63, 64, 65, 128, 256, 1 << 20, 1 << 33, usize::MAX / 4, usize::MAX];
        let mut change = |strides: &mut [usize]| {
            let axis = rng.below(strides.len());
            strides[axis] = numbers[rng.below(numbers.len())];
        };
        let answer = strided.run(|inputs, outputs| match round / 3 % 6 {
            0 => change(&mut inputs.q.strides),
            1 => change(&mut inputs.k.strides),
            2 => change(&mut inputs.v.strides),
            3 => change(&mut inputs.mask.as_mut().unwrap().strides),
            4 => change(&mut inputs.tree.as_mut().unwrap().strides),
            _ => change(&mut outputs.out.strides),
        });
        match answer {
            Ok(()) => ran += 1,
            Err(SessionError::Launch(error)) => panic!("round {round}: {error}"),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 100 && ran > 50, "{refused} refused, {ran} ran");
}

/// A tensor whose axis of a single index has any stride is one as any other.
#[test]
fn strides_of_axes_of_one_index_are_ignored() {
    let dims = Dims { batch: 1, q_heads: 2, kv_heads: 2, q_len: 3, kv_len: 5, head_dim: 64, value_dim: 64 };
    let x = random(&mut Rng::new(9), 5 * 2 * 64);
    let view = |rows: usize| TensorView::strided(&x, [1, 2, rows, 64], [usize::MAX, 64, 128, 1]).unwrap();
    let inputs = Inputs::new(view(3), view(5), view(5));
    agrees(&mut session(DECODE_TILE), &ProblemDesc::new(dims, Dtype::F32), &inputs);
}
