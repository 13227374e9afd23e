//! Libraries, their functions, and how they are compiled.

use std::path::Path;
use std::sync::Arc;

use block2::DynBlock;
use flashtile_msl_standin::{FunctionConstant, Library as MslLibrary};
use objc2::rc::Retained;
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject, Sel};
use objc2::{ClassType, DefinedClass, define_class, sel};
use objc2_foundation::{NSArray, NSDictionary, NSError, NSString};
use objc2_metal::{
    MTLBinaryArchive, MTLCompileOptions, MTLDataType, MTLDevice, MTLFunction, MTLFunctionConstant,
    MTLFunctionConstantValues, MTLFunctionDescriptor, MTLFunctionOptions, MTLFunctionType,
    MTLLanguageVersion, MTLLibrary, MTLLibraryError, MTLLibraryOptimizationLevel, MTLLibraryType,
    MTLMathFloatingPointFunctions, MTLMathMode,
};

use crate::answer::answer;
use crate::compile::{Program, Refusal, compile, digest};
use crate::constants::{data_type, values_for};
use crate::foundation::{array, dictionary, display, error, pairs_of, refuse, system};
use crate::machine::{Label, Machine, invalid};
use crate::object::{Protocol, object, ours, settings, text_of, thread_safe};
use crate::rules;

/// The domain of errors of libraries.
pub(crate) const DOMAIN: &str = "MTLLibraryErrorDomain";

/// The first bytes of a file that holds a library of this device.
const MAGIC: &[u8] = b"MTLB flashtile-metal-standin 1\n";

settings! {
    /// How a library is compiled.
    "MTLCompileOptions" as Options of OptionsIvars;
    values {
        fastMathEnabled/setFastMathEnabled: bool = true;
        mathMode/setMathMode: MTLMathMode = MTLMathMode::Fast;
        mathFloatingPointFunctions/setMathFloatingPointFunctions: MTLMathFloatingPointFunctions = MTLMathFloatingPointFunctions::Fast;
        // 0: the newest of the system.
        languageVersion/setLanguageVersion: MTLLanguageVersion = MTLLanguageVersion(0);
        libraryType/setLibraryType: MTLLibraryType = MTLLibraryType::Executable;
        optimizationLevel/setOptimizationLevel: MTLLibraryOptimizationLevel = MTLLibraryOptimizationLevel::Default;
        preserveInvariance/setPreserveInvariance: bool = false;
        maxTotalThreadsPerThreadgroup/setMaxTotalThreadsPerThreadgroup: usize = 0;
    }
    objects {
        preprocessorMacros/setPreprocessorMacros: NSDictionary<NSString, NSObject>;
        installName/setInstallName: NSString;
    }
    also {
        /// Methods that the system lacks are missing.
        #[unsafe(method(respondsToSelector:))]
        fn responds(&self, sel: Sel) -> bool {
            let is_of_math_mode = [
                sel!(mathMode),
                sel!(setMathMode:),
                sel!(mathFloatingPointFunctions),
                sel!(setMathFloatingPointFunctions:),
            ];
            Self::class().responds_to(sel) && (system().has_math_mode || !is_of_math_mode.contains(&sel))
        }
    }
}

settings! {
    /// Settings of a new function.
    "MTLFunctionDescriptor" as FunctionDescriptor of FunctionSettings;
    values {
        options/setOptions: MTLFunctionOptions = MTLFunctionOptions::None;
    }
    objects {
        name/setName: NSString;
        specializedName/setSpecializedName: NSString;
        constantValues/setConstantValues: MTLFunctionConstantValues;
        binaryArchives/setBinaryArchives: NSArray<ProtocolObject<dyn MTLBinaryArchive>>;
    }
    also {
        #[unsafe(method_id(functionDescriptor))]
        fn descriptor() -> Retained<Self> {
            object(FunctionSettings::default())
        }
    }
}

/// A device as objects know it.
pub(crate) type Device = Protocol<dyn MTLDevice>;

pub(crate) struct LibraryState {
    pub(crate) machine: Arc<Machine>,
    device: Device,
    msl: MslLibrary,
    /// Tells the program and its compilation apart, the same in every process.
    digest: u128,
    label: Label,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinLibrary"]
    #[ivars = Arc<LibraryState>]
    pub(crate) struct Library;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Library {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLLibrary for Library {
        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.get().map(|l| NSString::from_str(&l))
        }

        #[unsafe(method(setLabel:))]
        fn set_label(&self, label: Option<&NSString>) {
            self.ivars().label.set(&self.ivars().machine, "library", text_of(label));
        }

        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method(type))]
        fn kind(&self) -> MTLLibraryType {
            MTLLibraryType::Executable
        }

        #[unsafe(method_id(functionNames))]
        fn names(&self) -> Retained<NSArray<NSString>> {
            array(self.ivars().msl.kernels().into_iter().map(NSString::from_str).collect())
        }

        #[unsafe(method_id(newFunctionWithName:))]
        fn function(&self, name: &NSString) -> Option<Protocol<dyn MTLFunction>> {
            self.make(&name.to_string(), Vec::new())
        }

        #[unsafe(method_id(newFunctionWithName:constantValues:error:))]
        fn specialized(
            &self,
            name: &NSString,
            values: &MTLFunctionConstantValues,
            out: *mut *mut NSError,
        ) -> Option<Protocol<dyn MTLFunction>> {
            self.specialize(&name.to_string(), Some(values)).map_or_else(|e| refuse(out, described(e)), Some)
        }

        #[unsafe(method(newFunctionWithName:constantValues:completionHandler:))]
        fn specialized_later(&self, name: &NSString, values: &MTLFunctionConstantValues, block: &FunctionHandler) {
            answer(self.specialize(&name.to_string(), Some(values)).map_err(described), block);
        }

        #[unsafe(method_id(newFunctionWithDescriptor:error:))]
        fn of_descriptor(
            &self,
            descriptor: &MTLFunctionDescriptor,
            out: *mut *mut NSError,
        ) -> Option<Protocol<dyn MTLFunction>> {
            let settings = ours::<FunctionDescriptor, _>(descriptor).ivars();
            let Some(name) = settings.name.borrow().clone() else { invalid!("a function descriptor without a name") };
            let values = settings.constantValues.borrow().clone();
            let made = self.specialize(&name.to_string(), values.as_deref());
            made.map_or_else(|e| refuse(out, described(e)), Some)
        }
    }
);

/// A block that is called with a function or an error.
type FunctionHandler = DynBlock<dyn Fn(*mut ProtocolObject<dyn MTLFunction>, *mut NSError)>;

fn described((code, text): (MTLLibraryError, String)) -> Retained<NSError> {
    error(DOMAIN, code.0.cast_signed(), &text, Vec::new())
}

impl Library {
    fn specialize(
        &self,
        name: &str,
        values: Option<&MTLFunctionConstantValues>,
    ) -> Result<Protocol<dyn MTLFunction>, (MTLLibraryError, String)> {
        let msl = &self.ivars().msl;
        let not_found =
            || (MTLLibraryError::FunctionNotFound, format!("Function {name} was not found in the library"));
        let constants = values.map_or_else(Vec::new, |v| values_for(msl, v));
        if values.is_some() && msl.kernels().contains(&name) {
            msl.kernel(name, &constants).map_err(|e| (MTLLibraryError::CompileFailure, e.to_string()))?;
        }
        self.make(name, constants).ok_or_else(not_found)
    }

    fn make(&self, name: &str, constants: Vec<FunctionConstant>) -> Option<Protocol<dyn MTLFunction>> {
        let library = self.ivars().clone();
        library.msl.kernels().contains(&name).then(|| {
            let state = FunctionState { library, name: name.to_owned(), constants, label: Label::default() };
            let this: Retained<Function> = object(Arc::new(state));
            ProtocolObject::from_retained(this)
        })
    }
}

/// A kernel with its function constants.
pub(crate) struct FunctionState {
    pub(crate) library: Arc<LibraryState>,
    pub(crate) name: String,
    constants: Vec<FunctionConstant>,
    label: Label,
}

impl FunctionState {
    /// The kernel, which is not there where a constant that it needs is not set.
    pub(crate) fn kernel(&self) -> Result<flashtile_msl_standin::Kernel, String> {
        self.library.msl.kernel(&self.name, &self.constants).map_err(|e| e.to_string())
    }

    /// The key of the function in archives.
    pub(crate) fn key(&self) -> String {
        let constants: Vec<String> =
            self.constants.iter().map(|c| format!("{}={:?}", c.index, c.value)).collect();
        format!("{:032x} {} {}", self.library.digest, self.name, constants.join(","))
    }
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinFunction"]
    #[ivars = Arc<FunctionState>]
    pub(crate) struct Function;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Function {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLFunction for Function {
        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.get().map(|l| NSString::from_str(&l))
        }

        #[unsafe(method(setLabel:))]
        fn set_label(&self, label: Option<&NSString>) {
            self.ivars().label.set(&self.ivars().library.machine, "function", text_of(label));
        }

        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().library.device.clone()
        }

        #[unsafe(method(functionType))]
        fn kind(&self) -> MTLFunctionType {
            MTLFunctionType::Kernel
        }

        #[unsafe(method_id(name))]
        fn name(&self) -> Retained<NSString> {
            NSString::from_str(&self.ivars().name)
        }

        /// The constants that the library declares: which of them a kernel uses is not told.
        #[unsafe(method_id(functionConstantsDictionary))]
        fn constants(&self) -> Retained<NSDictionary<NSString, MTLFunctionConstant>> {
            let declared = self.ivars().library.msl.constants();
            let pairs = declared.into_iter().map(|c| {
                let ivars = ConstantIvars {
                    name: c.name.clone(),
                    ty: data_type(&c.type_name),
                    index: c.index as usize,
                    is_required: !c.is_optional,
                };
                let constant: Retained<Constant> = object(ivars);
                // SAFETY: the class is MTLFunctionConstant.
                (NSString::from_str(&c.name), unsafe { Retained::cast_unchecked(constant) })
            });
            dictionary(pairs.collect())
        }
    }
);

pub(crate) struct ConstantIvars {
    name: String,
    ty: MTLDataType,
    index: usize,
    is_required: bool,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "MTLFunctionConstant"]
    #[ivars = ConstantIvars]
    pub(crate) struct Constant;

    impl Constant {
        #[unsafe(method_id(name))]
        fn name(&self) -> Retained<NSString> {
            NSString::from_str(&self.ivars().name)
        }

        #[unsafe(method(type))]
        fn kind(&self) -> MTLDataType {
            self.ivars().ty
        }

        #[unsafe(method(index))]
        fn index(&self) -> usize {
            self.ivars().index
        }

        #[unsafe(method(required))]
        fn is_required(&self) -> bool {
            self.ivars().is_required
        }
    }
);

thread_safe!(Library, Function);

/// The state behind a function.
pub(crate) fn function_state(function: &ProtocolObject<dyn MTLFunction>) -> Arc<FunctionState> {
    ours::<Function, _>(function).ivars().clone()
}

/// The program for the compiler, as compile options say.
fn program(machine: &Machine, source: &NSString, options: Option<&MTLCompileOptions>) -> Program {
    let ivars = options.map(|o| ours::<Options, _>(o).ivars());
    let language = ivars.map(|i| i.languageVersion.get()).filter(|v| v.0 != 0);
    rules::language(language, &machine.profile);
    if let Some(i) = ivars {
        if i.libraryType.get() != MTLLibraryType::Executable {
            invalid!("a dynamic library, which kernels have no use for");
        }
        if i.mathMode.get() != MTLMathMode::Fast && !machine.profile.has_math_mode {
            invalid!(
                "unrecognized selector: -[MTLCompileOptions setMathMode:], which is of macOS 15 and iOS 18"
            );
        }
    }
    let macros = ivars.and_then(|i| i.preprocessorMacros.borrow().clone());
    let macros = macros.map_or_else(Vec::new, |m| pairs_of(&m));
    let value = |of: &objc2::runtime::AnyObject| {
        display(of).unwrap_or_else(|| {
            invalid!("preprocessorMacros: a name or value that is neither a string nor an NSNumber")
        })
    };
    let macros = macros.iter().map(|(name, of)| (value(name), value(of))).collect();
    Program { source: source.to_string(), language, macros }
}

/// A library of a program.
pub(crate) fn from_source(
    machine: &Arc<Machine>,
    device: Device,
    source: &NSString,
    options: Option<&MTLCompileOptions>,
) -> Result<Protocol<dyn MTLLibrary>, Retained<NSError>> {
    finish(machine, device, &program(machine, source, options))
}

fn finish(
    machine: &Arc<Machine>,
    device: Device,
    program: &Program,
) -> Result<Protocol<dyn MTLLibrary>, Retained<NSError>> {
    let msl = compile(machine, program)
        .map_err(|Refusal { code, text }| error(DOMAIN, code.0.cast_signed(), &text, Vec::new()))?;
    let digest = digest(&format!("{:?} {:?} {}", program.language, program.macros, program.source));
    let state = LibraryState { machine: machine.clone(), device, msl, digest, label: Label::default() };
    let this: Retained<Library> = object(Arc::new(state));
    Ok(ProtocolObject::from_retained(this))
}

/// The bytes of a file that `newLibraryWithURL:error:` opens, as `metallib` writes one for a device of Apple's: a program, whose language
/// version is of the file.
pub fn metallib(source: &str, language: MTLLanguageVersion) -> Vec<u8> {
    [MAGIC, format!("{}\n", language.0).as_bytes(), source.as_bytes()].concat()
}

/// A library of a file.
pub(crate) fn from_file(
    machine: &Arc<Machine>,
    device: Device,
    path: &Path,
) -> Result<Protocol<dyn MTLLibrary>, Retained<NSError>> {
    let refused =
        |code: MTLLibraryError, text: String| error(DOMAIN, code.0.cast_signed(), &text, Vec::new());
    let bytes = std::fs::read(path).map_err(|e| {
        refused(MTLLibraryError::FileNotFound, format!("library not found: {}: {e}", path.display()))
    })?;
    let parsed = bytes.strip_prefix(MAGIC).and_then(|rest| std::str::from_utf8(rest).ok()).and_then(|rest| {
        let (language, source) = rest.split_once('\n')?;
        Some((MTLLanguageVersion(language.parse().ok()?), source.to_owned()))
    });
    let Some((language, source)) = parsed else {
        return Err(refused(
            MTLLibraryError::CompileFailure,
            format!("Invalid library file: {}", path.display()),
        ));
    };
    finish(machine, device, &Program { source, language: Some(language), macros: Vec::new() })
}
