//! Sessions and tensors that own their memory, on the device.

use crate::support::{answer, build, cuda};
use flashtile::cuda::{CudaKvCache, GpuArray, GpuInputs, GpuOutputs, SessionError, TimedRun};
use flashtile::quality::{Accumulation, Tolerance, compare_out};
use flashtile::{
    CacheDesc, CacheLayout, CacheShape, Codec, Dtype, HeadShape, Outputs, OwnedTensor, PlanOptions,
    ProblemDesc, SeqLens, TensorView, TensorViewMut, Visibility, reference,
};
use flashtile_testkit::{CudaRunner, Guarded, GuardedList, Rng, catalogue, quantized};

/// Every feature: masks, slopes, sinks, tables, codes, and tensors of several layouts.
#[test]
fn uploaded_tensors_have_the_answer_of_guarded_ones() {
    let Some(cuda) = cuda() else { return };
    let runner = CudaRunner::new(cuda.clone());
    let cases = catalogue().into_iter().step_by(29).chain(quantized().into_iter().step_by(13));
    let mut computed = 0;
    for built in cases.map(|case| build(&case)) {
        let Ok(plan) = cuda.plan(&built.problem, PlanOptions::default()) else { continue };
        let dims = built.problem.dims();
        let mut out = Guarded::new(built.problem.dtype(), dims.out_shape(), built.layout);
        let mut lse = GuardedList::placed(dims.lse_shape().iter().product(), built.placement);
        let mut outputs = Outputs::new(out.view_mut());
        outputs.lse = Some(lse.slice_mut());
        let mut run = TimedRun::new(&cuda, &plan, &built.inputs(), &outputs).unwrap();
        // Twice, since runs share scratch memory.
        run.launch().unwrap();
        run.compute(&mut outputs).unwrap();
        assert_eq!((out.touched(), lse.touched()), (None, None), "{plan}");
        let want = answer(&built, &runner);
        let close = |got: &[f32], want: &[f32]| {
            got.iter().zip(want).all(|(a, b)| a == b || a.is_nan() && b.is_nan() || (a - b).abs() < 2e-2)
        };
        assert!(close(lse.slice(), want.lse.slice()), "{plan}");
        assert!(close(&out.values(), &want.out.values()), "{plan}");
        computed += 1;
    }
    println!("{computed} computed");
    assert!(computed > 20);
}

#[test]
fn an_array_is_refilled_in_place() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context().new_stream().unwrap();
    let numbers = |first: u16| (first..first + 24).map(f32::from).collect::<Vec<_>>();
    let (first, second) = (numbers(0), numbers(100));
    let shape = [1, 2, 3, 4];
    let gpu = cuda.gpu().on(&stream);
    let mut array = GpuArray::upload(&gpu, &TensorView::bhsd(&first, shape).unwrap()).unwrap();
    // Rows of all heads lie together.
    array.refill(&gpu, &TensorView::bshd(&second, [1, 3, 2, 4]).unwrap()).unwrap();
    let mut got = OwnedTensor::zeros(Dtype::F32, shape).unwrap();
    array.download(&gpu, &mut got.view_mut()).unwrap();
    for (h, row, i) in (0..2).flat_map(|h| (0..3).flat_map(move |row| (0..4).map(move |i| (h, row, i)))) {
        assert_eq!(got.view().get([0, h, row, i]), second[row * 8 + h * 4 + i]);
    }
    let other = TensorView::bhsd(&second, [1, 3, 2, 4]).unwrap();
    assert!(matches!(array.refill(&gpu, &other), Err(SessionError::Array { .. })));
}

/// Steps of two sequences, over native kernels and portable ones, each against the oracle.
#[test]
fn a_session_takes_steps_of_decoding() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context().new_stream().unwrap();
    let heads = HeadShape { q_heads: 8, kv_heads: 2, head_dim: 64, value_dim: 64 };
    for (dtype, codec) in [(Dtype::F16, Codec::F16), (Dtype::F32, Codec::Int8)] {
        let layout = CacheLayout::Paged { pages: 96, page_size: 16 };
        let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 64 };
        let mut desc = CacheDesc::new(layout, shape, codec);
        desc.v = codec;
        let mut device: CudaKvCache = cuda.kv_cache(desc, &stream).unwrap();
        let mut host = flashtile::KvCache::new(desc).unwrap();
        let [a, b] = [(); 2].map(|()| (host.create().unwrap(), device.create().unwrap()));
        let (mut session, gpu) = (cuda.session(&stream), cuda.gpu().on(&stream));
        let mut rng = Rng::new(7);
        for step in 0..40 {
            let tokens = if step == 0 { [300, 20] } else { [1, 1] };
            let count: usize = tokens.iter().sum();
            let mut rows = |heads: usize| {
                let mut rows = OwnedTensor::zeros(dtype, [1, heads, count, 64]).unwrap();
                let values: Vec<f32> = (0..heads * count * 64).map(|_| rng.normal()).collect();
                fill(&mut rows.view_mut(), &values);
                rows
            };
            let (q, k, v) = (rows(8), rows(2), rows(2));
            host.append(&[(a.0, tokens[0]), (b.0, tokens[1])], &[(k.view(), v.view())]).unwrap();
            let upload = |of: &OwnedTensor| GpuArray::upload(&gpu, &of.view()).unwrap();
            let (k, v) = (upload(&k), upload(&v));
            device.append(&[(a.1, tokens[0]), (b.1, tokens[1])], &[(k.view(), v.view())]).unwrap();
            let lens = [(a.0, tokens[0]), (b.0, tokens[1])]
                .map(|(sequence, q_len)| SeqLens { q_len, kv_len: host.len(sequence).unwrap() });
            let mut desc = ProblemDesc::cached(heads, dtype, &lens);
            desc.visibility = Visibility::causal();
            (desc.k_codec, desc.v_codec) = (Some(codec), Some(codec));

            let on_device = upload(&q);
            let mut out = GpuArray::zeros(&gpu, dtype, [1, 8, count, 64]).unwrap();
            let [k, v] = device.store().kv(0);
            let inputs = GpuInputs::new(on_device.view(), k, v);
            let tables = device.tables(&[a.1, b.1]).unwrap();
            // Two layers of a model.
            for _ in 0..2 {
                let mut outputs = GpuOutputs::new(out.view_mut());
                session.run_paged(&desc, &inputs, &tables, &mut outputs).unwrap();
            }
            let mut got = OwnedTensor::zeros(dtype, [1, 8, count, 64]).unwrap();
            out.download(&gpu, &mut got.view_mut()).unwrap();
            let tables = host.tables(&[a.0, b.0]).unwrap();
            let inputs = host.inputs(0, q.view(), &tables).unwrap();
            let want = reference::attention(&desc.validate().unwrap(), &inputs).unwrap();
            let accumulation =
                if codec == Codec::Int8 { Accumulation::Operands } else { Accumulation::of_cuda(dtype) };
            let tolerance = Tolerance::of(dtype, 400, accumulation);
            let report = compare_out(&values(&got.view()), &want, dtype, &tolerance);
            assert!(report.within(), "step {step} of {codec}: {report}");
        }
    }
}

/// Writes values to a dense tensor, rounded to its dtype.
fn fill(tensor: &mut TensorViewMut<'_>, values: &[f32]) {
    let ([_, heads, rows, dim], dtype) = (tensor.shape(), tensor.dtype());
    for (n, row) in values.chunks_exact(dim).enumerate() {
        let bytes: Vec<u8> = match dtype {
            Dtype::F16 => row.iter().flat_map(|x| half::f16::from_f32(*x).to_ne_bytes()).collect(),
            Dtype::BF16 => row.iter().flat_map(|x| half::bf16::from_f32(*x).to_ne_bytes()).collect(),
            Dtype::F32 => row.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        };
        assert!(n < heads * rows);
        tensor.row_bytes_mut([0, n / rows, n % rows]).copy_from_slice(&bytes);
    }
}

/// The elements of a tensor, in the order of its axes.
fn values(tensor: &TensorView<'_>) -> Vec<f32> {
    let [batch, heads, rows, dim] = tensor.shape();
    let places = (0..batch * heads * rows * dim)
        .map(|n| [n / dim / rows / heads, n / dim / rows % heads, n / dim % rows, n % dim]);
    places.map(|place| tensor.get(place)).collect()
}
