//! `#[kernel]`: the native function, and the module with the kernel as data and its launches.

use proc_macro2::{Ident, TokenStream};
use quote::{ToTokens, format_ident, quote};

use crate::arguments::{Arguments, Bench, Derived};
use crate::depends::{Depends, mentions};
use crate::errors::Errors;
use crate::expand::{self, NativeBody, Printed, element_type, parameter_kind, referent, with_errors};
use crate::ir::{Argument, Bound, Parameter, Passed};
use crate::lower::{self, Context, SharedArray};
use crate::{names, print, signature, source};

/// `#[kernel]`.
pub(crate) fn kernel(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    let mut function: syn::ItemFn = match syn::parse2(item.clone()) {
        Ok(function) => function,
        Err(error) => {
            errors.add(error);
            return with_errors(errors, item);
        }
    };
    let contract = errors.keep(syn::parse2::<Arguments>(arguments.clone())).unwrap_or_default();
    if contract.threads.is_none() && errors.is_empty() {
        errors.refuse(
            &function.sig.ident,
            "say how many threads a group has: `#[kernel(threads = 256)]`, or `threads <= 1024`",
        );
    }
    expand::attributes(&function.attrs, &[], &mut errors);
    let chosen = function.sig.generics.params.len();
    function.sig.generics.params.extend(contract.derive.iter().map(Derived::parameter));
    let mut depends = Depends::of_module();
    let signature = signature::read(&mut function, true, &mut errors, &mut depends);
    let signature::Signature { generics, arguments: mut parameters, result } = signature;
    if !parameters.iter().any(|(_, argument)| argument.passed == Passed::MemoryMut) && errors.is_empty() {
        errors.refuse(
            &function.sig.ident,
            "a kernel writes to a buffer: add a parameter `out: &mut Buffer<f32>`",
        );
    }
    check_contract(&contract, &generics, &mut errors);
    let name = function.sig.ident.to_string();
    let context = Context {
        errors: &mut errors,
        depends: &mut depends,
        generics: &generics,
        name: &name,
        kernel: true,
        result: result.as_ref(),
    };
    let lowered = lower::body(context, &mut parameters, &mut function.block);
    if !errors.is_empty() {
        return with_errors(errors, expand::native_function(&function, &NativeBody::Absent));
    }
    let native =
        expand::native_function(&function, &NativeBody::Checked { lowered: &lowered, has_result: false });
    let rust = format!("{}\n{}", attribute(arguments), source::of(item));
    let types = function.sig.inputs.iter().filter_map(|input| match input {
        syn::FnArg::Typed(typed) => Some(&*typed.ty),
        syn::FnArg::Receiver(_) => None,
    });
    let parameters = parameters
        .into_iter()
        .zip(types)
        .map(|((rust, argument), ty)| Launched {
            field: format_ident!("{rust}", span = function.sig.ident.span()),
            argument,
            ty,
        })
        .collect();
    let expansion = Expansion {
        function: &function,
        generics,
        chosen,
        parameters,
        contract,
        shared: lowered.shared,
        depends,
        body: print::body(&lowered.body),
        rust,
    };
    let module = expansion.module();
    let lints = expand::entry_lints();
    quote!(#lints #native #module)
}

/// The attribute as written, with a line for each line of its arguments.
fn attribute(arguments: TokenStream) -> String {
    let arguments = source::of(arguments);
    if arguments.contains('\n') {
        let lines: String = arguments.lines().map(|line| format!("    {line}\n")).collect();
        format!("#[kernel(\n{lines})]")
    } else {
        format!("#[kernel({arguments})]")
    }
}

fn check_contract(contract: &Arguments, generics: &[Parameter], errors: &mut Errors) {
    if let Some(threads) = &contract.threads
        && let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Int(literal), .. }) = &threads.most
        && !literal.base10_parse().is_ok_and(|n: u32| n.is_multiple_of(32) && (32..=1024).contains(&n))
    {
        errors.refuse(literal, "a group has a multiple of 32 threads, 32 to 1024: SIMD groups are whole");
    }
    for requirement in &contract.requires {
        for parameter in generics {
            if let (Parameter::Type { name, .. }, true) =
                (parameter, mentions(&requirement.condition.to_token_stream(), parameter.name()))
            {
                errors.refuse(
                    &requirement.condition,
                    format_args!(
                        "a launch does not know the type `{name}`: require something of lengths and numbers"
                    ),
                );
            }
        }
    }
    if let Some(bench) = &contract.bench {
        let missing = [("bytes", &bench.bytes), ("flops", &bench.flops), ("tolerance", &bench.tolerance)];
        for (name, _) in missing.into_iter().filter(|(_, value)| value.is_none()) {
            errors.refuse_at(bench.span, format_args!("`bench` says `{name} = ..`"));
        }
    }
}

/// A parameter of a kernel, as a field of its launches.
struct Launched<'a> {
    field: Ident,
    argument: Argument,
    ty: &'a syn::Type,
}

struct Expansion<'a> {
    function: &'a syn::ItemFn,
    generics: Vec<Parameter>,
    /// How many of the generics are not derived.
    chosen: usize,
    parameters: Vec<Launched<'a>>,
    contract: Arguments,
    shared: Vec<SharedArray>,
    depends: Depends,
    body: String,
    rust: String,
}

impl Expansion<'_> {
    fn module(&self) -> TokenStream {
        let (vis, name) = (&self.function.vis, &self.function.sig.ident);
        let docs = format!("The kernel [`{name}()`] as data, and its launches.");
        let lints = expand::module_lints();
        let (data, derived, instances, call) =
            (self.data(), self.derived_numbers(), self.instances(), self.call());
        let demands = self.depends.demands();
        quote! {
            #[doc = #docs]
            #lints
            #vis mod #name {
                use super::*;
                use ::flashtile_kernel::source as ft_source;
                #data
                #derived
                #instances
                #call
                #demands
            }
        }
    }

    /// `let N = ..;` for every const parameter, out of an expression for generics.
    fn constants(&self, generics: &TokenStream) -> TokenStream {
        let constants = self.generics.iter().enumerate().filter_map(|(n, parameter)| match parameter {
            Parameter::Const { name, ty } => {
                let (name, ty) = (format_ident!("{name}"), format_ident!("{}", ty.rust()));
                Some(quote! {
                    #[allow(non_snake_case, unused_variables)]
                    let #name: #ty = ft_source::ConstGeneric::of(#generics, #n);
                })
            }
            Parameter::Type { .. } => None,
        });
        constants.collect()
    }

    /// `let T = ..;` for every type parameter: its value in derived generics.
    fn types(&self, value: impl Fn(usize, &Ident) -> TokenStream) -> TokenStream {
        let types = self.generics.iter().enumerate().filter_map(|(n, parameter)| match parameter {
            Parameter::Type { name, .. } => {
                let name = format_ident!("{name}");
                let value = value(n, &name);
                Some(quote! {
                    #[allow(non_snake_case, unused_variables)]
                    let #name: ::flashtile_kernel::ScalarType = #value;
                })
            }
            Parameter::Const { .. } => None,
        });
        types.collect()
    }

    /// The generic parameters as data.
    fn generics(&self) -> impl Iterator<Item = TokenStream> {
        self.generics.iter().map(|parameter| {
            let name = parameter.name();
            let kind = match parameter {
                Parameter::Type { bound, .. } => {
                    let kind = match bound {
                        Bound::Scalar => "Scalar",
                        Bound::Number => "Number",
                        Bound::Element => "Element",
                    };
                    let kind = format_ident!("{kind}");
                    quote!(ft_source::GenericKind::#kind)
                }
                Parameter::Const { ty, .. } => {
                    let variant = format_ident!("{}", ty.variant());
                    quote!(ft_source::GenericKind::Const(::flashtile_kernel::ScalarType::#variant))
                }
            };
            quote!(ft_source::GenericParameter { name: #name, cpp: #name, kind: #kind })
        })
    }

    /// The derived generics as data.
    fn derived(&self) -> impl Iterator<Item = TokenStream> {
        let constants = self.constants(&quote!(ft_generics));
        let types = self.types(|n, _| quote!(ft_source::type_of(ft_generics, #n)));
        let parameters = self.generics().zip(&self.generics).skip(self.chosen);
        parameters.zip(&self.contract.derive).map(move |((parameter, of), Derived { kind, value, .. })| {
            let expression = source::of(value.to_token_stream());
            let value = match of {
                Parameter::Type { .. } => quote!(::flashtile_kernel::Generic::Type(#value)),
                Parameter::Const { .. } => quote!(<#kind as ft_source::ConstGeneric>::generic(#value)),
            };
            quote! {
                ft_source::DerivedGeneric {
                    parameter: #parameter,
                    expression: #expression,
                    value: |ft_generics| { #constants #types #value },
                }
            }
        })
    }

    /// `derived`, the derived numbers out of the generics that their formulas have: constants, for rustc's generics.
    fn derived_numbers(&self) -> TokenStream {
        let derived = self.generics.iter().skip(self.chosen).zip(&self.contract.derive);
        let numbers: Vec<&Derived> = derived
            .filter(|(parameter, _)| matches!(parameter, Parameter::Const { .. }))
            .map(|(_, number)| number)
            .collect();
        if numbers.is_empty() {
            return TokenStream::new();
        }
        let formulas: TokenStream = numbers.iter().map(|number| number.value.to_token_stream()).collect();
        let is_given =
            |name: &str| mentions(&formulas, name) && numbers.iter().all(|number| number.name != name);
        let given = self.generics.iter().filter(|parameter| is_given(parameter.name())).map(|parameter| {
            let name = format_ident!("{}", parameter.name());
            let ty = match parameter {
                Parameter::Const { ty, .. } => format_ident!("{}", ty.rust()).to_token_stream(),
                Parameter::Type { .. } => quote!(::flashtile_kernel::ScalarType),
            };
            quote!(#name: #ty)
        });
        let lints = expand::entry_lints();
        let fields = numbers.iter().map(|Derived { name, kind, .. }| quote!(pub #name: #kind));
        let values = numbers.iter().map(|Derived { name, kind, value }| quote!(let #name: #kind = #value;));
        let names = numbers.iter().map(|number| &number.name);
        quote! {
            /// The numbers among the generics that follow from others.
            #[allow(missing_docs)]
            #[derive(Clone, Copy, Debug)]
            pub struct Derived {
                #(#fields,)*
            }

            /// The derived numbers, out of the generics that their formulas have, in order. A type is given as its `ScalarType`.
            #lints
            pub const fn derived(#(#given),*) -> Derived {
                #(#values)*
                Derived { #(#names),* }
            }
        }
    }

    /// Fails to compile where rustc's generics are not the derived ones.
    fn derived_checks(&self) -> TokenStream {
        let types = self.types(|_, name| quote!(<#name as ::flashtile_kernel::Scalar>::TYPE));
        let derived = self.generics.iter().skip(self.chosen).zip(&self.contract.derive);
        let checks = derived.map(|(parameter, Derived { name, value, .. })| {
            let message = format!("{name} is derived: `{}`", source::of(value.to_token_stream()));
            // Scalar types are compared as numbers: constants cannot call `PartialEq`.
            let cast = matches!(parameter, Parameter::Type { .. }).then(|| quote!(as u8));
            quote!(::core::assert!(#name #cast == (#value) #cast, #message);)
        });
        let checks: TokenStream = checks.collect();
        if checks.is_empty() { checks } else { quote!(const { #types #checks }) }
    }

    /// The kernel as data, and the constants that check the names of its program.
    fn data(&self) -> TokenStream {
        let name = &self.function.sig.ident;
        let spelled = name.to_string();
        let cpp = names::global(&spelled);
        let docs = expand::docs(&self.function.attrs).join("\n");
        let (parameters, requirements, shared) = (self.parameters(), self.requirements(), self.shared());
        let (generics, derived) = (self.generics().take(self.chosen), self.derived());
        let constants = self.constants(&quote!(ft_generics));
        let threads = self.contract.threads.as_ref().map(|threads| {
            let (kind, most) =
                (format_ident!("{}", if threads.exactly { "Exactly" } else { "UpTo" }), &threads.most);
            quote!(ft_source::Threads::#kind((#most) as u32))
        });
        let resident = match &self.contract.resident {
            Some(groups) => quote!((#groups) as u32),
            None => quote!(0),
        };
        let exact = self.contract.exact;
        let bench = match &self.contract.bench {
            Some(bench) => {
                let bench = measured(bench);
                quote!(::core::option::Option::Some(#bench))
            }
            None => quote!(::core::option::Option::None),
        };
        let (unmet, clashes) = (self.unmet(), self.clashes());
        let body = &self.body;
        let printed = quote!(::flashtile_kernel::source::Cpp::Printed(#body));
        let item_source = expand::item_source(
            &Printed { name, kind: "Kernel", cpp: printed, rust: self.rust.clone() },
            &self.depends.sources(),
        );
        quote! {
            /// The kernel as data.
            pub static KERNEL: ::flashtile_kernel::Kernel = ::flashtile_kernel::Kernel {
                name: #spelled,
                cpp: #cpp,
                module: ::core::module_path!(),
                docs: #docs,
                parameters: &[#(#parameters),*],
                generics: &[#(#generics),*],
                derived: &[#(#derived),*],
                requirements: &[#(#requirements),*],
                unmet: #unmet,
                threads: |ft_generics| { #constants #threads },
                resident: |ft_generics| { #constants #resident },
                shared: &[#(#shared),*],
                exact: #exact,
                source: SOURCE,
                bench: #bench,
            };
            const SOURCE: ::flashtile_kernel::ItemSource = #item_source;
            const ITEMS: ft_source::Items<'static> = ft_source::Items::of(&SOURCE);
            // Other items of one name that this kernel uses are refused here.
            const _: () = ITEMS.assert_distinct();
            #clashes
        }
    }

    /// The parameters as data.
    fn parameters(&self) -> impl Iterator<Item = TokenStream> {
        self.parameters.iter().map(|Launched { field, argument, ty }| {
            let (rust, cpp) = (field.to_string(), &argument.name);
            let kind = parameter_kind(&argument.ty, &argument.passed, ty, &self.generics);
            quote!(ft_source::Parameter { name: #rust, cpp: #cpp, kind: #kind })
        })
    }

    /// The conditions as data.
    fn requirements(&self) -> impl Iterator<Item = TokenStream> {
        self.contract.requires.iter().map(|requirement| {
            let condition = source::of(requirement.condition.to_token_stream());
            let message = &requirement.message;
            quote!(ft_source::Requirement { condition: #condition, message: #message })
        })
    }

    /// The threadgroup arrays as data.
    fn shared(&self) -> impl Iterator<Item = TokenStream> {
        let constants = self.constants(&quote!(ft_generics));
        self.shared.iter().map(move |SharedArray { name, element, length }| {
            let element = element_type(element, &self.generics);
            quote! {
                ft_source::SharedArray {
                    name: #name,
                    element: #element,
                    len: |ft_generics| { #constants #length },
                }
            }
        })
    }

    /// The conditions, over the arguments of a launch by the parameters' names.
    fn unmet(&self) -> TokenStream {
        if self.contract.requires.is_empty() {
            return quote!(|_| ::core::option::Option::None);
        }
        let constants = self.constants(&quote!(ft_facts.generics()));
        let parameters = self.parameters.iter().enumerate().map(|(n, Launched { field, argument, ty })| {
            let value = match argument.passed {
                Passed::Memory | Passed::MemoryMut => quote!(&ft_facts.buffer(#n)),
                Passed::Params => {
                    let ty = referent(ty);
                    quote!(&ft_facts.plain::<#ty>(#n))
                }
                Passed::Constant => quote!(ft_facts.constant::<#ty>(#n)),
                _ => quote!(ft_facts.plain::<#ty>(#n)),
            };
            quote!(let #field = #value;)
        });
        let conditions = self.contract.requires.iter().enumerate().map(|(n, requirement)| {
            let condition = &requirement.condition;
            quote! {
                if !(#condition) {
                    return ::core::option::Option::Some(#n);
                }
            }
        });
        quote! {
            |ft_facts| {
                #constants
                #[allow(unused_variables)]
                let (groups, threads) = (ft_facts.groups(), ft_facts.threads());
                #(#[allow(unused_variables)] #parameters)*
                #(#conditions)*
                ::core::option::Option::None
            }
        }
    }

    /// Refuses items of the names that a program defines beside them: of the generics, the constants and the function.
    fn clashes(&self) -> TokenStream {
        let kernel = self.function.sig.ident.to_string();
        // The function of a kernel with generics has their values in its name.
        let function = self.generics.is_empty().then(|| (names::global(&kernel), kernel, "the kernel"));
        let generics = self.generics.iter().map(|parameter| {
            let name = parameter.name().to_owned();
            (name.clone(), name, "a generic parameter of the kernel")
        });
        let constants = self.parameters.iter().filter_map(|Launched { field, argument, .. }| {
            let constant = argument.passed == Passed::Constant;
            constant
                .then(|| (argument.name.clone(), field.to_string(), "a #[constant] parameter of the kernel"))
        });
        let asserts = function.into_iter().chain(generics).chain(constants).map(|(symbol, name, what)| {
            let message = format!(
                "`{name}` is {what} and an item that it uses, directly or not: rename one, C++ has one namespace for them"
            );
            quote!(const _: () = ::core::assert!(ITEMS.is_free(#symbol), #message);)
        });
        asserts.collect()
    }

    fn instances(&self) -> TokenStream {
        let name = &self.function.sig.ident;
        let (parameters, arguments, _) = self.function.sig.generics.split_for_impl();
        let turbofish = arguments.as_turbofish();
        let passed =
            self.parameters.iter().enumerate().map(|(n, Launched { argument, .. })| match argument.passed {
                Passed::Memory => quote!(&ft_arguments.buffer(#n)),
                Passed::MemoryMut => quote!(&mut ft_arguments.buffer(#n)),
                Passed::Params => quote!(&ft_arguments.plain(#n)),
                Passed::Constant => quote!(ft_arguments.constant(#n)),
                _ => quote!(ft_arguments.plain(#n)),
            });
        let values = self.generics.iter().map(|parameter| {
            let name = format_ident!("{}", parameter.name());
            match parameter {
                Parameter::Type { .. } => {
                    quote!(::flashtile_kernel::Generic::Type(<#name as ::flashtile_kernel::Scalar>::TYPE))
                }
                Parameter::Const { .. } => quote!(ft_source::ConstGeneric::generic(#name)),
            }
        });
        let checks = self.derived_checks();
        quote! {
            /// The kernel for these generics, with its native code where the simulator is there to run it.
            pub fn instance #parameters () -> ::flashtile_kernel::Instance {
                #checks
                #[allow(dead_code)]
                fn native #parameters (ft_arguments: &::flashtile_kernel::simulator::Arguments) {
                    super::#name #turbofish (#(#passed),*)
                }
                let native = ::flashtile_kernel::native!(native #turbofish);
                ::flashtile_kernel::Instance::checked(&KERNEL, &[#(#values),*], native)
            }

            /// The kernel for generics chosen at run time: to print, and for devices that compile source.
            ///
            /// # Errors
            /// Where the generics are not this kernel's.
            pub fn specialise(
                generics: &[::flashtile_kernel::Generic],
            ) -> ::core::result::Result<::flashtile_kernel::Instance, ft_source::GenericsError> {
                ::flashtile_kernel::Instance::new(&KERNEL, generics, ::core::option::Option::None)
            }
        }
    }

    /// `Call`, which is a launch, and its methods.
    fn call(&self) -> TokenStream {
        let fields = self.parameters.iter().map(|Launched { field, argument, ty }| {
            let (docs, ty) = match (&argument.passed, &argument.ty) {
                (Passed::Memory, _) => ("is read", quote!(::flashtile_kernel::View<'a, FtDevice::Memory>)),
                (Passed::MemoryMut, _) => {
                    ("is written", quote!(::flashtile_kernel::ViewMut<'a, FtDevice::Memory>))
                }
                (Passed::Constant, _) => ("is fixed when the pipeline is made", ty.to_token_stream()),
                _ => ("is copied", referent(ty)),
            };
            let docs = format!("`{field}`: {docs}.");
            quote!(#[doc = #docs] pub #field: #ty)
        });
        let threads = (!self.fixed_threads()).then(|| {
            quote! {
                /// Threads of a group.
                pub threads: u32
            }
        });
        let launches = self.launches();
        quote! {
            /// A launch: one field a parameter, and the number of groups.
            #[derive(Debug)]
            pub struct Call<'a, FtDevice: ::flashtile_kernel::Device> {
                #(#fields,)*
                /// Groups along each coordinate.
                pub groups: [u32; 3],
                #threads
            }

            #launches
        }
    }

    /// Returns true if the contract fixes the number of threads.
    fn fixed_threads(&self) -> bool {
        self.contract.threads.as_ref().is_none_or(|threads| threads.exactly)
    }

    /// The methods of `Call`.
    fn launches(&self) -> TokenStream {
        let (parameters, arguments, _) = self.function.sig.generics.split_for_impl();
        let turbofish = arguments.as_turbofish();
        let passed = self.parameters.iter().map(|Launched { field, argument, .. }| {
            let argument = match argument.passed {
                Passed::Memory => quote!(Read(self.#field)),
                Passed::MemoryMut => quote!(Write(self.#field)),
                Passed::Constant => quote!(constant(self.#field)),
                _ => quote!(plain(&self.#field)),
            };
            quote!(::flashtile_kernel::Argument::#argument)
        });
        let threads =
            if self.fixed_threads() { quote!(instance.threads().most()) } else { quote!(self.threads) };
        quote! {
            impl<FtDevice: ::flashtile_kernel::Device> Call<'_, FtDevice> {
                /// Launches the kernel for these generics.
                ///
                /// # Errors
                /// Where the contract does not hold or the device fails.
                pub fn launch #parameters (
                    self,
                    device: &FtDevice,
                ) -> ::core::result::Result<(), ::flashtile_kernel::LaunchError<FtDevice::Error>> {
                    self.launch_instance(device, &instance #turbofish ())
                }

                /// Launches an instance of the kernel.
                ///
                /// # Errors
                /// Where it is of another kernel, the contract does not hold or the device fails.
                pub fn launch_instance(
                    self,
                    device: &FtDevice,
                    instance: &::flashtile_kernel::Instance,
                ) -> ::core::result::Result<(), ::flashtile_kernel::LaunchError<FtDevice::Error>> {
                    if !::core::ptr::eq(instance.kernel(), &KERNEL) {
                        return ::core::result::Result::Err(
                            ::flashtile_kernel::ContractError::instance(&KERNEL, instance).into(),
                        );
                    }
                    let launch = ::flashtile_kernel::Launch::new(
                        instance,
                        self.groups,
                        #threads,
                        ::std::vec![#(#passed),*],
                        &device.limits(),
                    )?;
                    device.launch(launch).map_err(::flashtile_kernel::LaunchError::Device)
                }
            }
        }
    }
}

fn measured(bench: &Bench) -> TokenStream {
    let shapes = bench.shapes.iter().map(|sizes| {
        let sizes = sizes.iter().map(|(name, size)| {
            let name = name.to_string();
            quote!((#name, (#size) as u64))
        });
        quote!(ft_source::Shape { sizes: &[#(#sizes),*] })
    });
    let names = bench.shapes.first().into_iter().flatten().map(|(name, _)| {
        let spelled = name.to_string();
        quote! {
            #[allow(unused_variables)]
            let #name: u64 = ft_shape.get(#spelled);
        }
    });
    let names: TokenStream = names.collect();
    let Bench { bytes, flops, tolerance, .. } = bench;
    quote! {
        ft_source::Bench {
            shapes: &[#(#shapes),*],
            bytes: |ft_shape| { #names (#bytes) as u64 },
            flops: |ft_shape| { #names (#flops) as u64 },
            tolerance: #tolerance,
        }
    }
}
