//! Temporary files and folders that neither a failure nor a signal leaves behind.

use std::fs::Permissions;
use std::io::Result;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::{TempDir, TempPath};

/// Paths of existing temporary files and folders. The lock is held while a file is created, renamed or removed and until the list
/// is up to date, so that a signal never ends the process in between.
static EXISTING: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn existing() -> MutexGuard<'static, Vec<PathBuf>> {
    EXISTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is removed unless it is renamed.
pub(crate) struct Temporary {
    /// `None` once the file has been renamed or removed.
    file: Option<TempPath>,
}

impl Temporary {
    /// Creates a file in a folder with permission bits `mode`, less the process's umask, on systems that have them.
    pub(crate) fn create(folder: &Path, mode: u32) -> Result<Self> {
        signals::clean_up_on()?;
        let mut builder = tempfile::Builder::new();
        builder.prefix(".flashtile-");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(std::fs::Permissions::from_mode(mode));
        }
        #[cfg(not(unix))]
        let _ = mode;
        let mut existing = existing();
        let file = builder.tempfile_in(folder)?.into_temp_path();
        existing.push(file.to_path_buf());
        Ok(Self { file: Some(file) })
    }

    /// Checks that files can be created in a folder.
    pub(crate) fn is_possible(folder: &Path) -> Result<()> {
        signals::clean_up_on()?;
        // Some file systems have no unnamed files; there the file has a name for a moment.
        let _held = existing();
        tempfile::tempfile_in(folder).map(drop)
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.as_deref().unwrap_or(Path::new(""))
    }

    /// Renames the file, replacing any file of that name.
    pub(crate) fn rename(mut self, to: &Path) -> Result<()> {
        let mut existing = existing();
        let Some(file) = self.file.take() else { return Ok(()) };
        let from = file.to_path_buf();
        // On failure, the error owns the file and removes it.
        let renamed = file.persist(to).map_err(|e| e.error);
        existing.retain(|path| *path != from);
        renamed
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            let mut existing = existing();
            existing.retain(|path| *path != *file);
            drop(file);
        }
    }
}

/// A folder that is removed with its files unless it is renamed.
pub(crate) struct TemporaryFolder {
    /// `None` once the folder has been renamed or removed.
    folder: Option<TempDir>,
}

impl TemporaryFolder {
    /// Creates a folder in another one, with these permissions, by default the ones of a new folder.
    pub(crate) fn create(parent: &Path, permissions: Option<Permissions>) -> Result<Self> {
        signals::clean_up_on()?;
        let mut builder = tempfile::Builder::new();
        builder.prefix(".flashtile-");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(Permissions::from_mode(0o777));
        }
        let mut existing = existing();
        let folder = builder.tempdir_in(parent)?;
        existing.push(folder.path().to_owned());
        let created = Self { folder: Some(folder) };
        drop(existing);
        if let Some(permissions) = permissions {
            std::fs::set_permissions(created.path(), permissions)?;
        }
        Ok(created)
    }

    fn path(&self) -> &Path {
        self.folder.as_ref().map_or(Path::new(""), TempDir::path)
    }

    /// Writes a file of the folder. Under the lock, no file is added to a folder that is being removed.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let _held = existing();
        std::fs::write(self.path().join(name), bytes)
    }

    /// Renames the folder, replacing an empty folder of that name.
    pub(crate) fn rename(mut self, to: &Path) -> Result<()> {
        let mut existing = existing();
        let Some(folder) = self.folder.take() else { return Ok(()) };
        let from = folder.path().to_owned();
        // Elsewhere than on Unix, nothing is renamed over a folder.
        let emptied = if cfg!(not(unix)) && to.is_dir() { std::fs::remove_dir(to) } else { Ok(()) };
        let renamed = emptied.and_then(|()| std::fs::rename(&from, to));
        if renamed.is_ok() {
            // Nothing of that name is left to be removed.
            let _ = folder.keep();
        }
        existing.retain(|path| *path != from);
        renamed
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if let Some(folder) = self.folder.take() {
            let mut existing = existing();
            existing.retain(|path| path != folder.path());
            drop(folder);
        }
    }
}

#[cfg(unix)]
mod signals {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXFSZ};
    use signal_hook::iterator::Signals;
    use std::io::Result;
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, Mutex, PoisonError};

    /// From here on, signals that end the process remove temporary files and folders first. The process still ends by the signal,
    /// as shells and build tools expect.
    pub(super) fn clean_up_on() -> Result<()> {
        static DONE: Mutex<bool> = Mutex::new(false);
        let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
        if *done {
            return Ok(());
        }
        // By default, exceeding the file size limit ends the process; with a handler, the write fails instead.
        signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
        // A process that was started to ignore a signal, as by nohup, continues to do so.
        let ending = [SIGHUP, SIGINT, SIGQUIT, SIGTERM].into_iter().filter(|&signal| !is_ignored(signal));
        let mut signals = Signals::new(ending)?;
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            if let Some(signal) = signals.forever().next() {
                let existing = super::existing();
                for path in existing.iter() {
                    if std::fs::remove_file(path).is_err() {
                        let _ = std::fs::remove_dir_all(path);
                    }
                }
                // The lock is held to the end: no further file is created.
                let _ = signal_hook::low_level::emulate_default_handler(signal);
                std::process::exit(128 + signal);
            }
        })?;
        *done = true;
        Ok(())
    }

    #[allow(unsafe_code)]
    fn is_ignored(signal: i32) -> bool {
        // SAFETY: all zeros are a valid value of the struct, whose fields are integers and an optional function.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: without a new action, the call writes the current one to borrowed memory and changes nothing.
        let status = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        status == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(not(unix))]
mod signals {
    /// Other systems end a process without notice.
    pub(super) fn clean_up_on() -> std::io::Result<()> {
        Ok(())
    }
}
