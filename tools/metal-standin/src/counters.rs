//! Counter sets and sample buffers: times at the start and at the end of encoders.

use std::sync::atomic::AtomicPtr;
use std::sync::{Arc, Mutex};

use objc2::rc::Retained;
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{ClassType, DefinedClass, define_class};
use objc2_foundation::{NSArray, NSData, NSError, NSRange, NSString};
use objc2_metal::{
    MTLCounter, MTLCounterSampleBuffer, MTLCounterSampleBufferError, MTLCounterSet, MTLStorageMode,
};

use crate::foundation::{array, constant, data, error};
use crate::library::Device;
use crate::machine::{Machine, invalid, lock};
use crate::object::{Protocol, object, ours, settings, thread_safe};

/// Symbols that the bindings link to.
#[unsafe(no_mangle)]
static MTLCommonCounterSetTimestamp: AtomicPtr<NSString> = AtomicPtr::new(std::ptr::null_mut());
#[unsafe(no_mangle)]
static MTLCommonCounterTimestamp: AtomicPtr<NSString> = AtomicPtr::new(std::ptr::null_mut());
#[unsafe(no_mangle)]
static MTLCounterErrorDomain: AtomicPtr<NSString> = AtomicPtr::new(std::ptr::null_mut());

const SET: &str = "timestamp";
const COUNTER: &str = "GPUTimestamp";
const DOMAIN: &str = "MTLCounterErrorDomain";

/// MTLCounterDontSample: no sample is wanted.
pub(crate) const DONT_SAMPLE: usize = usize::MAX;
/// MTLCounterErrorValue: what a sample holds that was not taken.
const NOT_SAMPLED: u64 = u64::MAX;
/// Bytes of samples that a buffer may have. "MTLDevice, makeCounterSampleBuffer(descriptor:)": 32 KB.
const MAX_BYTES: usize = 32768;

settings! {
    /// Settings of a new counter sample buffer.
    "MTLCounterSampleBufferDescriptor" as SampleDescriptor of SampleSettings;
    values {
        storageMode/setStorageMode: MTLStorageMode = MTLStorageMode::Shared;
        sampleCount/setSampleCount: usize = 0;
    }
    objects {
        label/setLabel: NSString;
        counterSet/setCounterSet: ProtocolObject<dyn MTLCounterSet>;
    }
    also {}
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinCounterSet"]
    #[ivars = ()]
    pub(crate) struct CounterSet;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for CounterSet {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLCounterSet for CounterSet {
        #[unsafe(method_id(name))]
        fn name(&self) -> Retained<NSString> {
            NSString::from_str(SET)
        }

        #[unsafe(method_id(counters))]
        fn counters(&self) -> Retained<NSArray<ProtocolObject<dyn MTLCounter>>> {
            let counter: Retained<Counter> = object(());
            array(vec![ProtocolObject::from_retained(counter)])
        }
    }
);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinCounter"]
    #[ivars = ()]
    pub(crate) struct Counter;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Counter {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLCounter for Counter {
        #[unsafe(method_id(name))]
        fn name(&self) -> Retained<NSString> {
            NSString::from_str(COUNTER)
        }
    }
);

pub(crate) struct SampleState {
    pub(crate) machine: Arc<Machine>,
    device: Device,
    label: String,
    samples: Mutex<Vec<u64>>,
}

impl SampleState {
    /// Stores a time, in nanoseconds.
    pub(crate) fn sample(&self, index: usize, seconds: f64) {
        if index != DONT_SAMPLE {
            lock(&self.samples)[index] = (seconds * 1e9) as u64;
        }
    }

    /// Samples as bytes, eight each.
    pub(crate) fn bytes(&self, range: std::ops::Range<usize>) -> Vec<u8> {
        lock(&self.samples)[range].iter().flat_map(|s| s.to_ne_bytes()).collect()
    }

    /// "MTLComputePassSampleBufferAttachmentDescriptor": indices are less than the count of samples.
    pub(crate) fn check(&self, index: usize) {
        let count = lock(&self.samples).len();
        if index != DONT_SAMPLE && index >= count {
            invalid!("sample {index} of a counter sample buffer of {count}");
        }
    }

    pub(crate) fn check_range(&self, range: NSRange) {
        let count = lock(&self.samples).len();
        if range.end() > count {
            invalid!("samples {}..{} of a counter sample buffer of {count}", range.location, range.end());
        }
    }
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinCounterSampleBuffer"]
    #[ivars = Arc<SampleState>]
    pub(crate) struct SampleBuffer;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for SampleBuffer {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLCounterSampleBuffer for SampleBuffer {
        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method_id(label))]
        fn label(&self) -> Retained<NSString> {
            NSString::from_str(&self.ivars().label)
        }

        #[unsafe(method(sampleCount))]
        fn count(&self) -> usize {
            lock(&self.ivars().samples).len()
        }

        #[unsafe(method_id(resolveCounterRange:))]
        fn resolve(&self, range: NSRange) -> Option<Retained<NSData>> {
            self.ivars().check_range(range);
            Some(data(self.ivars().bytes(range.location..range.end())))
        }
    }
);

thread_safe!(CounterSet, Counter, SampleBuffer);

/// The counter sets of a device: times.
pub(crate) fn sets() -> Retained<NSArray<ProtocolObject<dyn MTLCounterSet>>> {
    let set: Retained<CounterSet> = object(());
    array(vec![ProtocolObject::from_retained(set)])
}

/// A sample buffer.
pub(crate) fn new_samples(
    machine: &Arc<Machine>,
    device: Device,
    settings: &SampleSettings,
) -> Result<Protocol<dyn MTLCounterSampleBuffer>, Retained<NSError>> {
    let refused = |code: MTLCounterSampleBufferError, text: &str| error(DOMAIN, code.0, text, Vec::new());
    let count = settings.sampleCount.get();
    if settings.counterSet.borrow().is_none() || count == 0 {
        return Err(refused(
            MTLCounterSampleBufferError::Invalid,
            "a descriptor without a counter set or samples",
        ));
    }
    if count * size_of::<u64>() > MAX_BYTES {
        let text = format!("{count} samples of 8 bytes, at most {MAX_BYTES} bytes");
        return Err(refused(MTLCounterSampleBufferError::Invalid, &text));
    }
    let label = settings.label.borrow().as_ref().map_or_else(String::new, ToString::to_string);
    let samples = Mutex::new(vec![NOT_SAMPLED; count]);
    let this: Retained<SampleBuffer> =
        object(Arc::new(SampleState { machine: machine.clone(), device, label, samples }));
    Ok(ProtocolObject::from_retained(this))
}

/// The state behind a sample buffer.
pub(crate) fn sample_state(buffer: &ProtocolObject<dyn MTLCounterSampleBuffer>) -> &Arc<SampleState> {
    ours::<SampleBuffer, _>(buffer).ivars()
}

pub(crate) fn register() {
    constant(&MTLCommonCounterSetTimestamp, SET);
    constant(&MTLCommonCounterTimestamp, COUNTER);
    constant(&MTLCounterErrorDomain, DOMAIN);
    let _ = (SampleDescriptor::class(), SampleBuffer::class());
}
