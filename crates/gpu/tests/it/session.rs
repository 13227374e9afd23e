//! Sessions on the simulator, and on a CUDA device where there is one: plans are kept from call to call, and every call has the oracle's
//! answer.

use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::{CodePages, Codec, KvView, Side};
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::{Inputs, Outputs, RunError};
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Dims, HeadShape, ProblemDesc, QOffset, SeqLens, Visibility};
use flashtile_core::reference;
use flashtile_core::tensor::{TensorView, TensorViewMut};
use flashtile_gpu::SessionError;
use flashtile_gpu::facts::GpuFacts;
use flashtile_gpu::session::Session;
use flashtile_gpu::simulator::{DECODE_TILE, no_native, session};
use flashtile_kernel::HostAccess;
use flashtile_kernel::cuda::Gpu;
use flashtile_testkit::Rng;

fn random(rng: &mut Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.normal()).collect()
}

/// Computes on a session what a description says, and compares with the oracle.
fn agrees<D: HostAccess>(session: &mut Session<D>, desc: &ProblemDesc, inputs: &Inputs<'_>) {
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
fn on_cuda() -> Option<Session<Gpu>> {
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
    Some(Session::new(gpu, facts))
}

#[test]
fn calls_of_several_descriptions_have_their_answers() {
    several_descriptions(&mut session(DECODE_TILE));
    if let Some(mut session) = on_cuda() {
        several_descriptions(&mut session);
    }
}

fn several_descriptions<D: HostAccess>(session: &mut Session<D>) {
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

fn several_steps<D: HostAccess>(session: &mut Session<D>) {
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
