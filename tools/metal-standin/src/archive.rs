//! Binary archives: which pipelines need not be compiled.
//!
//! The file keeps what tells pipelines apart: the device and the system that compiled them, and for each the program, its compilation, its
//! kernel and the values of its function constants; not the compiled code, which the stand-in's compiler makes in any case.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

use objc2::rc::Retained;
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{DefinedClass, define_class};
use objc2_foundation::{NSArray, NSError, NSString, NSURL};
use objc2_metal::{MTLBinaryArchive, MTLBinaryArchiveError, MTLComputePipelineDescriptor};

use crate::compile::digest;
use crate::foundation::{error, objects_of, path_of, refuse};
use crate::library::{Device, function_state};
use crate::machine::{Label, Machine, lock};
use crate::object::{Protocol, object, ours, settings, text_of, thread_safe};
use crate::pipeline_descriptor::PipelineDescriptor;
use crate::rules;

const DOMAIN: &str = "MTLBinaryArchiveDomain";
const MAGIC: &str = "flashtile-metal-standin archive 1";

settings! {
    /// Which file an archive is opened from.
    "MTLBinaryArchiveDescriptor" as ArchiveDescriptor of ArchiveSettings;
    values {}
    objects {
        url/setUrl: NSURL;
    }
    also {}
}

pub(crate) struct ArchiveState {
    machine: Arc<Machine>,
    device: Device,
    keys: Mutex<BTreeSet<String>>,
    label: Label,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinBinaryArchive"]
    #[ivars = ArchiveState]
    pub(crate) struct Archive;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Archive {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLBinaryArchive for Archive {
        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.get().map(|l| NSString::from_str(&l))
        }

        #[unsafe(method(setLabel:))]
        fn set_label(&self, label: Option<&NSString>) {
            self.ivars().label.set(&self.ivars().machine, "archive", text_of(label));
        }

        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method(addComputePipelineFunctionsWithDescriptor:error:))]
        fn add(&self, descriptor: &MTLComputePipelineDescriptor, out: *mut *mut NSError) -> bool {
            self.ivars().add(descriptor).map_or_else(|(code, text)| refused(out, code, &text), |()| true)
        }

        #[unsafe(method(serializeToURL:error:))]
        fn serialize(&self, url: &NSURL, out: *mut *mut NSError) -> bool {
            let keys: Vec<String> = lock(&self.ivars().keys).iter().cloned().collect();
            let path = path_of(url);
            match std::fs::write(&path, file(&self.ivars().machine, &keys)) {
                Ok(()) => true,
                Err(e) => {
                    refused(out, MTLBinaryArchiveError::InternalError, &format!("{}: {e}", path.display()))
                }
            }
        }
    }
);

thread_safe!(Archive);

impl ArchiveState {
    fn add(&self, descriptor: &MTLComputePipelineDescriptor) -> Result<(), (MTLBinaryArchiveError, String)> {
        let function = ours::<PipelineDescriptor, _>(descriptor).ivars().computeFunction.borrow().clone();
        let Some(function) = function else {
            return Err((MTLBinaryArchiveError::UnexpectedElement, "a descriptor without a function".into()));
        };
        let function = function_state(&function);
        rules::same_device(function.library.machine.id, self.machine.id, "a function");
        function.kernel().map_err(|text| (MTLBinaryArchiveError::CompilationFailure, text))?;
        if lock(&self.keys).insert(function.key()) {
            // A function is compiled for the archive that takes it up.
            self.machine.count(|c| c.pipelines += 1);
        }
        Ok(())
    }
}

fn refused(out: *mut *mut NSError, code: MTLBinaryArchiveError, text: &str) -> bool {
    refuse::<()>(out, error(DOMAIN, code.0.cast_signed(), text, Vec::new())).is_some()
}

/// The first lines of a file, which describe the device that wrote it.
fn header(machine: &Machine) -> String {
    format!("{MAGIC}\n{} {:?}\n", machine.profile.name, machine.profile.system)
}

fn file(machine: &Machine, keys: &[String]) -> String {
    let body = format!("{}{}\n", header(machine), keys.join("\n"));
    format!("{body}{:032x}\n", digest(&body))
}

/// The keys of a file, or why it is refused.
fn keys_of(machine: &Machine, text: &str) -> Result<BTreeSet<String>, String> {
    let end = text.trim_end_matches('\n').rfind('\n').ok_or("the file is cut off")? + 1;
    let (body, check) = text.split_at(end);
    if check.trim_end() != format!("{:032x}", digest(body)) {
        return Err("the file is damaged".into());
    }
    let keys = body.strip_prefix(&header(machine)).ok_or("the file is of another device or system")?;
    Ok(keys.lines().filter(|k| !k.is_empty()).map(str::to_owned).collect())
}

/// An archive, empty or of a file.
pub(crate) fn archive(
    machine: &Arc<Machine>,
    device: Device,
    settings: &ArchiveSettings,
) -> Result<Protocol<dyn MTLBinaryArchive>, Retained<NSError>> {
    let invalid =
        |text: &str| error(DOMAIN, MTLBinaryArchiveError::InvalidFile.0.cast_signed(), text, Vec::new());
    let keys = match &*settings.url.borrow() {
        None => BTreeSet::new(),
        Some(url) => read(machine, &path_of(url)).map_err(|text| invalid(&text))?,
    };
    let state =
        ArchiveState { machine: machine.clone(), device, keys: Mutex::new(keys), label: Label::default() };
    let this: Retained<Archive> = object(state);
    Ok(ProtocolObject::from_retained(this))
}

fn read(machine: &Machine, path: &Path) -> Result<BTreeSet<String>, String> {
    let mut faults = lock(&machine.faults);
    if faults.archives > 0 {
        faults.archives -= 1;
        return Err(format!("{}: the archive is refused", path.display()));
    }
    let text = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let text = String::from_utf8(text).map_err(|_| format!("{}: the file is damaged", path.display()))?;
    keys_of(machine, &text).map_err(|why| format!("{}: {why}", path.display()))
}

/// Returns true if one of the archives has a pipeline.
pub(crate) fn has(
    archives: &NSArray<ProtocolObject<dyn MTLBinaryArchive>>,
    key: &str,
    machine: &Machine,
) -> bool {
    objects_of(archives).iter().any(|a| {
        let state = ours::<Archive, _>(&**a).ivars();
        rules::same_device(state.machine.id, machine.id, "a binary archive");
        lock(&state.keys).contains(key)
    })
}
