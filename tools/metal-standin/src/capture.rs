//! Captures and their scopes: nothing is captured, but calls are written to the device's log.

use std::sync::{Arc, Mutex};

use objc2::rc::Retained;
use objc2::runtime::{AnyObject, NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{ClassType, DefinedClass, define_class, msg_send};
use objc2_foundation::{NSError, NSString, NSURL};
use objc2_metal::{
    MTLCaptureDescriptor, MTLCaptureDestination, MTLCaptureError, MTLCaptureScope, MTLCommandQueue, MTLDevice,
};

use crate::device::machine_of;
use crate::foundation::{error, path_of, refuse};
use crate::library::Device;
use crate::machine::{Entry, Label, Machine, invalid, lock};
use crate::object::{Protocol, Sent, object, ours, settings, text_of};

settings! {
    /// The captured object, and the destination of the capture.
    "MTLCaptureDescriptor" as CaptureDescriptor of CaptureSettings;
    values {
        destination/setDestination: MTLCaptureDestination = MTLCaptureDestination::DeveloperTools;
    }
    objects {
        captureObject/setCaptureObject: AnyObject;
        outputURL/setOutputURL: NSURL;
    }
    also {}
}

pub(crate) struct ScopeIvars {
    machine: Arc<Machine>,
    device: Device,
    queue: Option<Protocol<dyn MTLCommandQueue>>,
    label: Label,
    is_open: Mutex<bool>,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinCaptureScope"]
    #[ivars = ScopeIvars]
    pub(crate) struct Scope;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Scope {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLCaptureScope for Scope {
        #[unsafe(method(beginScope))]
        fn begin(&self) {
            if std::mem::replace(&mut *lock(&self.ivars().is_open), true) {
                invalid!("beginScope of a capture scope that has begun");
            }
            self.ivars().machine.write(Entry::ScopeBegin(self.ivars().label.get()));
        }

        #[unsafe(method(endScope))]
        fn end(&self) {
            if !std::mem::replace(&mut *lock(&self.ivars().is_open), false) {
                invalid!("endScope of a capture scope without beginScope");
            }
            self.ivars().machine.write(Entry::ScopeEnd(self.ivars().label.get()));
        }

        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.get().map(|l| NSString::from_str(&l))
        }

        #[unsafe(method(setLabel:))]
        fn set_label(&self, label: Option<&NSString>) {
            self.ivars().label.set(&self.ivars().machine, "capture scope", text_of(label));
        }

        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method_id(commandQueue))]
        fn queue(&self) -> Option<Protocol<dyn MTLCommandQueue>> {
            self.ivars().queue.clone()
        }
    }
);

/// The device that is captured, for the process.
static CAPTURING: Mutex<Option<Arc<Machine>>> = Mutex::new(None);
static DEFAULT_SCOPE: Mutex<Option<Sent<Protocol<dyn MTLCaptureScope>>>> = Mutex::new(None);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "MTLCaptureManager"]
    #[ivars = ()]
    pub(crate) struct Manager;

    impl Manager {
        #[unsafe(method_id(sharedCaptureManager))]
        fn shared() -> Retained<Self> {
            object(())
        }

        #[unsafe(method_id(newCaptureScopeWithDevice:))]
        fn scope_of_device(&self, device: &ProtocolObject<dyn MTLDevice>) -> Protocol<dyn MTLCaptureScope> {
            scope(objc2::Message::retain(device), None)
        }

        #[unsafe(method_id(newCaptureScopeWithCommandQueue:))]
        fn scope_of_queue(&self, queue: &ProtocolObject<dyn MTLCommandQueue>) -> Protocol<dyn MTLCaptureScope> {
            scope(queue.device(), Some(objc2::Message::retain(queue)))
        }

        /// "MTLCaptureManager, supportsDestination(_:)": files where the environment has METAL_CAPTURE_ENABLED=1, as the host's
        /// Info.plist may say too; Xcode is not there.
        #[unsafe(method(supportsDestination:))]
        fn supports(&self, destination: MTLCaptureDestination) -> bool {
            destination == MTLCaptureDestination::GPUTraceDocument && is_enabled()
        }

        #[unsafe(method(startCaptureWithDescriptor:error:))]
        fn start(&self, descriptor: &MTLCaptureDescriptor, out: *mut *mut NSError) -> bool {
            let settings = ours::<CaptureDescriptor, _>(descriptor).ivars();
            match started(settings) {
                Ok(()) => true,
                Err((code, text)) => {
                    refuse::<()>(out, error("MTLCaptureErrorDomain", code.0, text, Vec::new())).is_some()
                }
            }
        }

        #[unsafe(method(stopCapture))]
        fn stop(&self) {
            if let Some(machine) = lock(&CAPTURING).take() {
                machine.write(Entry::CaptureStop);
            }
        }

        #[unsafe(method(isCapturing))]
        fn is_capturing(&self) -> bool {
            lock(&CAPTURING).is_some()
        }

        #[unsafe(method_id(defaultCaptureScope))]
        fn default_scope(&self) -> Option<Protocol<dyn MTLCaptureScope>> {
            lock(&DEFAULT_SCOPE).as_ref().map(|s| (**s).clone())
        }

        #[unsafe(method(setDefaultCaptureScope:))]
        fn set_default_scope(&self, scope: Option<&ProtocolObject<dyn MTLCaptureScope>>) {
            // SAFETY: scopes are used by any thread.
            let scope = scope.map(|s| unsafe { Sent::new(objc2::Message::retain(s)) });
            *lock(&DEFAULT_SCOPE) = scope;
        }
    }
);

fn is_enabled() -> bool {
    std::env::var_os("METAL_CAPTURE_ENABLED").is_some_and(|v| v == "1")
}

fn scope(device: Device, queue: Option<Protocol<dyn MTLCommandQueue>>) -> Protocol<dyn MTLCaptureScope> {
    let machine = machine_of(&device).clone();
    let this: Retained<Scope> =
        object(ScopeIvars { machine, device, queue, label: Label::default(), is_open: Mutex::default() });
    ProtocolObject::from_retained(this)
}

fn started(settings: &CaptureSettings) -> Result<(), (MTLCaptureError, &'static str)> {
    let mut capturing = lock(&CAPTURING);
    if capturing.is_some() {
        return Err((MTLCaptureError::AlreadyCapturing, "Capturing is already in progress"));
    }
    if settings.destination.get() != MTLCaptureDestination::GPUTraceDocument || !is_enabled() {
        return Err((
            MTLCaptureError::NotSupported,
            "Capturing is not supported: METAL_CAPTURE_ENABLED is not 1",
        ));
    }
    let Some(captured) = settings.captureObject.borrow().clone() else {
        return Err((MTLCaptureError::InvalidDescriptor, "The descriptor has no captureObject"));
    };
    let file = settings.outputURL.borrow().as_ref().map(|u| path_of(u));
    let Some(file) = file else {
        return Err((MTLCaptureError::InvalidDescriptor, "The descriptor has no outputURL"));
    };
    if file.exists() {
        return Err((MTLCaptureError::InvalidDescriptor, "The file of outputURL exists"));
    }
    let kind = captured.class().name().to_string_lossy().into_owned();
    let device: Device = if captured.class() == crate::device::StandinDevice::class() {
        // SAFETY: the object is a device.
        unsafe { Retained::cast_unchecked(captured) }
    } else {
        // SAFETY: queues and scopes, which the descriptor takes otherwise, have a device.
        unsafe { msg_send![&*captured, device] }
    };
    let machine = machine_of(&device);
    machine.write(Entry::CaptureStart(kind, Some(file.display().to_string())));
    *capturing = Some(machine.clone());
    Ok(())
}

pub(crate) fn register() {
    let _ = (CaptureDescriptor::class(), Manager::class());
}
