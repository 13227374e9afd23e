//! A runner allocates nothing after the first call of a description.

#![allow(unsafe_code, reason = "an allocator is unsafe to implement")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use flashtile::{
    Attention, BackwardInputs, Cpu, Gradients, MaskView, Runner, TensorView, TensorViewMut, attention,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Allocations of this thread.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no counter any more.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations of a call.
fn allocations(call: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    call();
    ALLOCATIONS.get() - before
}

#[test]
fn the_first_call_allocates_and_the_others_do_not() {
    let data = vec![0.5f32; 2 * 4 * 64 * 32];
    let view = TensorView::bhsd(&data, [2, 4, 64, 32]).unwrap();
    let visible = vec![true; 64 * 64];
    let mask = MaskView::dense_bool(&visible, [64, 64]).unwrap();
    let lens = [64, 10];
    let options = [
        Attention::causal(),
        Attention::decode().window(9, 0).softcap(20.0),
        Attention::full().mask(mask).kv_lens(&lens),
    ];
    let mut out = vec![0.0f32; data.len()];
    let mut out = TensorViewMut::bhsd(&mut out, [2, 4, 64, 32]).unwrap();
    let mut runner = Runner::with_cpu(Cpu::new().with_threads(1));
    for (n, options) in options.iter().enumerate() {
        assert!(allocations(|| runner.attention(view, view, view, &mut out, options).unwrap()) > 0);
        for _ in 0..3 {
            let counted = allocations(|| runner.attention(view, view, view, &mut out, options).unwrap());
            assert_eq!(counted, 0, "options {n}");
        }
    }
    // In turns, as layers with windows and without are.
    for n in [0, 1, 0, 1, 2] {
        let counted = allocations(|| runner.attention(view, view, view, &mut out, &options[n]).unwrap());
        assert_eq!(counted, 0, "options {n}");
    }
}

#[test]
fn gradients_of_a_known_description_allocate_nothing() {
    let (shape, len) = ([1, 2, 40, 16], 2 * 40 * 16);
    let data = vec![0.5f32; len];
    let x = TensorView::bhsd(&data, shape).unwrap();
    let lse = vec![5.0f32; 2 * 40];
    let inputs = BackwardInputs::new([x, x, x], x, &lse, x);
    let [mut d_q, mut d_k, mut d_v] = std::array::from_fn(|_| vec![0.0f32; len]);
    let view = |memory| TensorViewMut::bhsd(memory, shape).unwrap();
    let mut gradients = Gradients::new(view(&mut d_q), view(&mut d_k), view(&mut d_v));
    let desc = Attention::causal().desc(&x, &x, &x);
    let mut runner = Runner::with_cpu(Cpu::new().with_threads(1));
    let mut call = || allocations(|| runner.run_backward(&desc, &inputs, &mut gradients).unwrap());
    let counted = [call(), call(), call()];
    assert!(counted[0] > 0 && counted[1..] == [0, 0], "{counted:?}");
}

/// The free function keeps a runner for each thread. Inside the pool, as on its threads, rayon queues in memory it has.
#[test]
fn the_one_call_door_does_not_allocate_either() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let counted = pool.install(|| {
        let data = vec![0.5f32; 4 * 64 * 32];
        let view = TensorView::bhsd(&data, [1, 4, 64, 32]).unwrap();
        let mut out = vec![0.0f32; data.len()];
        let mut out = TensorViewMut::bhsd(&mut out, [1, 4, 64, 32]).unwrap();
        let mut call =
            || allocations(|| attention(view, view, view, &mut out, &Attention::causal()).unwrap());
        [call(), call(), call()]
    });
    assert!(counted[0] > 0 && counted[1..] == [0, 0], "{counted:?}");
}
