//! Launches: the threads of a threadgroup are coroutines, scheduled one at a time.

use super::machine::{Machine, with_current};
use super::memory::{CheckedRegion, Memory, Storage};
use super::{BufferReport, Fault, FaultKind, Report, panics};
use crate::arguments::{Arguments, Value};
use crate::device::{Argument, Device, HostAccess, Launch, Limits};
use crate::facts::Span;
use crate::region::Region;
use crate::scalar::ScalarType;
use crate::source::{Kernel, Native};
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, Yielder};
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

/// Runs kernels on the host, every access checked.
///
/// Each thread of a threadgroup has a stack: address space, of which only touched pages take memory. Stacks are kept for later launches.
/// A switch between threads takes 10 to 20 ns, and an access to memory about as long.
#[derive(Debug)]
pub struct Simulator {
    seed: u64,
    iterations: u64,
    stack_bytes: usize,
    limits: Limits,
    stacks: Mutex<Vec<Stack>>,
    report: Mutex<Report>,
    buffers: Mutex<Vec<BufferReport>>,
}

struct Stack(DefaultStack);

impl std::fmt::Debug for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Stack")
    }
}

/// A simulator of the same seed and limits, with stacks and reports of its own.
impl Clone for Simulator {
    fn clone(&self) -> Self {
        let Self { seed, iterations, stack_bytes, limits, .. } = *self;
        Self { seed, iterations, stack_bytes, limits, ..Self::default() }
    }
}

impl Default for Simulator {
    fn default() -> Self {
        Self::new()
    }
}

impl Simulator {
    /// A simulator of seed 0, with stacks of 256 KiB and the limits every device has, where a thread may go through
    /// 2^20 iterations of `while` and `loop`.
    pub fn new() -> Self {
        Self {
            seed: 0,
            iterations: 1 << 20,
            stack_bytes: 256 << 10,
            limits: Limits::default(),
            stacks: Mutex::default(),
            report: Mutex::default(),
            buffers: Mutex::default(),
        }
    }

    /// Draws the order of threads and threadgroups from `seed`.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Lets a thread go through `iterations` iterations of `while` and `loop` before it counts as endless.
    pub fn iterations(self, iterations: u64) -> Self {
        Self { iterations, ..self }
    }

    /// Gives threads stacks of `bytes`, for kernels with large local arrays.
    pub fn stack_bytes(self, bytes: usize) -> Self {
        Self { stack_bytes: bytes, stacks: Mutex::default(), ..self }
    }

    /// Takes the limits of another device.
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// Counts of the last launch.
    pub fn report(&self) -> Report {
        *self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts of the accesses of the last launch to each of its buffers, in the order of the parameters.
    pub fn buffer_reports(&self) -> Vec<BufferReport> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn take_stack(&self) -> std::io::Result<DefaultStack> {
        let kept = self.stacks.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.map_or_else(|| DefaultStack::new(self.stack_bytes), |stack| Ok(stack.0))
    }

    fn keep_stack(&self, stack: DefaultStack) {
        self.stacks.lock().unwrap_or_else(PoisonError::into_inner).push(Stack(stack));
    }

    /// Runs the threadgroup that the machine was set to, until every thread has returned or been unwound.
    fn run_group(
        &self,
        machine: &Rc<Machine>,
        native: Native,
        arguments: &Rc<Arguments>,
    ) -> std::io::Result<()> {
        let threads = crate::simulator::place().threads as usize;
        let mut coroutines = Vec::with_capacity(threads);
        for _ in 0..threads {
            let (machine, arguments) = (Rc::clone(machine), Rc::clone(arguments));
            let body = move |yielder: &Yielder<(), ()>, ()| {
                machine.run_thread(yielder, || native(&arguments));
            };
            coroutines.push(Coroutine::with_stack(self.take_stack()?, body));
        }
        while let Some(thread) = machine.pick() {
            panics::noted(|| coroutines[thread as usize].resume(()));
            if machine.is_stopping() {
                break;
            }
        }
        machine.diagnose();
        // After a fault, waiting threads unwind from where they wait.
        for (thread, coroutine) in coroutines.iter_mut().enumerate() {
            if coroutine.started() && !coroutine.done() {
                machine.switch_to(thread as u32);
                panics::noted(|| coroutine.resume(()));
            }
        }
        for coroutine in coroutines {
            if coroutine.done() {
                self.keep_stack(coroutine.into_stack());
            }
        }
        Ok(())
    }
}

impl Device for Simulator {
    type Memory = Memory;
    type Error = Fault;

    fn limits(&self) -> Limits {
        self.limits
    }

    fn launch(&self, mut launch: Launch<'_, Memory>) -> Result<(), Fault> {
        let instance = launch.instance();
        let kernel = instance.kernel();
        let groups = launch.groups();
        let Some(native) = instance.native() else {
            return Err(unlaunched(kernel, format!("{} has no native code", instance.entry())));
        };
        let machine = Rc::new(Machine::new(kernel, groups, launch.threads(), self.seed, self.iterations));
        let mut arguments = Vec::new();
        let mut storages = Vec::new();
        for (argument, parameter) in launch.arguments_mut().iter_mut().zip(kernel.parameters) {
            let (memory, span) = match argument {
                Argument::Read(view) => (view.memory(), view.span()),
                Argument::Write(view) => (view.memory(), view.span()),
                Argument::Bytes(bytes) => {
                    arguments.push(Value::Bytes(std::mem::take(bytes)));
                    continue;
                }
                Argument::Constant(constant) => {
                    arguments.push(Value::Constant(*constant));
                    continue;
                }
            };
            let Some(bytes) = memory.range(span) else {
                let Span { offset, len, .. } = span;
                let has = memory.len();
                let name = parameter.name;
                let message = format!("{name}: {len} elements from {offset} on, of a memory of {has}");
                return Err(unlaunched(kernel, message));
            };
            // The launch works on a copy: memory that is only read stays as it is.
            let storage = Storage::new(memory.content().clone(), memory.element());
            storages.push((parameter.name, Rc::clone(&storage)));
            let size = span.element.bytes();
            arguments.push(Value::Buffer(Region::new(CheckedRegion {
                machine: Rc::clone(&machine),
                storage,
                bytes,
                size,
                name: parameter.name,
                shared: false,
            })));
        }
        let arguments = Rc::new(Arguments::of(arguments));

        let count = groups.iter().map(|&n| n as usize).product();
        let mut order: Vec<usize> = (0..count).collect();
        let result = with_current(&machine, || {
            for n in 0..count {
                order.swap(n, n + machine.random(count - n));
                let (number, [x, y, _]) = (order[n], groups.map(|n| n as usize));
                let position = [number % x, number / x % y, number / (x * y)].map(|n| n as u32);
                machine.start_group(number as u32, position);
                if let Err(error) = self.run_group(&machine, native, &arguments) {
                    return Err(unlaunched(kernel, format!("no stack for a thread: {error}")));
                }
                if let Some(fault) = machine.take_fault() {
                    return Err(fault);
                }
            }
            Ok(())
        });
        machine.end();

        let buffers = launch.arguments_mut().iter_mut().filter_map(|argument| match argument {
            Argument::Read(_) => Some(None),
            Argument::Write(view) => Some(Some(view)),
            Argument::Bytes(_) | Argument::Constant(_) => None,
        });
        let mut reports = Vec::with_capacity(storages.len());
        for (view, (name, storage)) in buffers.zip(storages) {
            reports.push(storage.borrow().report(name));
            if let Some(view) = view {
                *view.memory_mut().content_mut() = storage.borrow_mut().take();
            }
        }
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) = machine.report();
        *self.buffers.lock().unwrap_or_else(PoisonError::into_inner) = reports;
        result
    }
}

impl HostAccess for Simulator {
    fn zeroed(&self, element: ScalarType, len: usize) -> Result<Memory, Fault> {
        Ok(Memory::zeroed(element, len))
    }

    fn uninit(&self, element: ScalarType, len: usize) -> Result<Memory, Fault> {
        Ok(Memory::uninit_of(element, len))
    }

    fn write(&self, memory: &mut Memory, at: usize, bytes: &[u8]) -> Result<(), Fault> {
        memory.write_bytes(at, bytes);
        Ok(())
    }

    fn read(&self, memory: &Memory, at: usize, bytes: &mut [u8]) -> Result<(), Fault> {
        memory.read_bytes(at, bytes);
        Ok(())
    }
}

/// A launch that did not begin.
fn unlaunched(kernel: &'static Kernel, message: String) -> Fault {
    let (file, line) = (kernel.source.file.to_owned(), kernel.source.line);
    let (kind, kernel) = (FaultKind::Launch, kernel.name);
    Fault { kernel, kind, file, line, thread: 0, lane: 0, group: [0; 3], message }
}
