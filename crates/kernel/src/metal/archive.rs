//! Compiled pipelines on disk: a binary archive a pipeline.

use super::error::{Error, describe};
use super::object::MetalDevice;
use crate::disk::{DiskCache, key};
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSArray, NSProcessInfo, NSString, NSURL};
use objc2_metal::{MTLBinaryArchive, MTLBinaryArchiveDescriptor, MTLComputePipelineDescriptor, MTLDevice};
use std::path::Path;
use tempfile::{NamedTempFile, TempPath};

/// A binary archive.
pub(super) type Archive = Retained<ProtocolObject<dyn MTLBinaryArchive>>;

/// Binary archives on disk, of one device and one version of its system: archives of another would be refused or outdated (Apple,
/// `MTLBinaryArchive`: software updates make an archive outdated).
#[derive(Debug)]
pub(super) struct Archives {
    disk: DiskCache,
    /// Name of the device, version and build of the system.
    device: [String; 2],
}

impl Archives {
    pub(super) fn new(device: &MetalDevice) -> Self {
        let system = NSProcessInfo::processInfo().operatingSystemVersionString().to_string();
        Self { disk: DiskCache::new("metalarchive"), device: [device.name().to_string(), system] }
    }

    /// The folder, if archives are kept.
    pub(super) fn folder(&self) -> Option<&Path> {
        self.disk.folder()
    }

    /// The key of code that is compiled from these texts.
    pub(super) fn key<'a>(&'a self, texts: impl IntoIterator<Item = &'a str>) -> String {
        key(self.device.iter().map(String::as_str).chain(texts))
    }

    /// The bytes that were kept under these names.
    pub(super) fn recall(&self, names: &[&str]) -> Option<Vec<u8>> {
        self.disk.read(&self.key(names.iter().copied()))
    }

    /// Keeps bytes under these names.
    pub(super) fn remember(&self, names: &[&str], bytes: &[u8]) -> Result<(), Error> {
        Ok(self.disk.write(&self.key(names.iter().copied()), bytes)?)
    }

    /// The archive of a key, if it was kept and Metal takes it, and the file that it is read from.
    pub(super) fn open(&self, device: &MetalDevice, key: &str) -> Option<(Archive, TempPath)> {
        // Metal reads files: the digest is checked, then the archive becomes a file of its own.
        let file = temporary()?;
        std::fs::write(&file, self.disk.read(key)?).ok()?;
        let descriptor = MTLBinaryArchiveDescriptor::new();
        descriptor.setUrl(Some(&*url(&file)?));
        let archive = device.newBinaryArchiveWithDescriptor_error(&descriptor).ok()?;
        Some((archive, file))
    }

    /// Compiles the pipeline of a descriptor into a new archive, to which the descriptor then refers; `None`
    /// where archives are not kept.
    pub(super) fn fill(
        &self,
        device: &MetalDevice,
        descriptor: &MTLComputePipelineDescriptor,
        kernel: &str,
    ) -> Result<Option<Archive>, Error> {
        if self.disk.folder().is_none() {
            return Ok(None);
        }
        let failed = |error: Retained<objc2_foundation::NSError>| Error::archive(kernel, &error);
        let archive = device
            .newBinaryArchiveWithDescriptor_error(&MTLBinaryArchiveDescriptor::new())
            .map_err(failed)?;
        archive.addComputePipelineFunctionsWithDescriptor_error(descriptor).map_err(failed)?;
        refer(descriptor, &archive);
        Ok(Some(archive))
    }

    /// Keeps an archive.
    pub(super) fn keep(&self, key: &str, archive: &Archive, kernel: &str) -> Result<(), Error> {
        let failed = |error: String| Error::Archive { kernel: kernel.to_owned(), error };
        let folder = tempfile::tempdir().map_err(|error| failed(error.to_string()))?;
        let file = folder.path().join("archive");
        let url = url(&file).ok_or_else(|| failed("the temporary folder is no UTF-8".to_owned()))?;
        archive.serializeToURL_error(&url).map_err(|error| failed(describe(&error)))?;
        let bytes = std::fs::read(&file).map_err(|error| failed(error.to_string()))?;
        Ok(self.disk.write(key, &bytes)?)
    }
}

/// Makes a descriptor look for its functions in an archive.
pub(super) fn refer(descriptor: &MTLComputePipelineDescriptor, archive: &Archive) {
    descriptor.setBinaryArchives(Some(&NSArray::from_slice(&[&**archive])));
}

/// A file that is removed when the value is dropped.
fn temporary() -> Option<TempPath> {
    NamedTempFile::new().ok().map(NamedTempFile::into_temp_path)
}

fn url(path: &Path) -> Option<Retained<NSURL>> {
    path.to_str().map(|path| NSURL::fileURLWithPath(&NSString::from_str(path)))
}
