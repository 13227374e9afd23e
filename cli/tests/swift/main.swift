// Makes pipelines of exported kernels and encodes launches on a device that records what it is given.

final class Buffer: MTLBuffer {
    let length: Int
    init(_ length: Int) { self.length = length }
    func contents() -> UnsafeMutableRawPointer { fatalError("nothing reads a buffer") }
}

final class Function: MTLFunction {
    let name: String
    let constants: MTLFunctionConstantValues
    init(_ name: String, _ constants: MTLFunctionConstantValues) {
        self.name = name
        self.constants = constants
    }
}

final class Program: MTLLibrary {
    func makeFunction(name: String, constantValues: MTLFunctionConstantValues) throws -> any MTLFunction {
        Function(name, constantValues)
    }
}

final class State: MTLComputePipelineState {
    let function: Function
    let maxTotalThreadsPerThreadgroup: Int
    let threadExecutionWidth: Int
    init(_ function: Function, _ threads: Int, _ width: Int) {
        self.function = function
        maxTotalThreadsPerThreadgroup = threads
        threadExecutionWidth = width
    }
}

final class Device: MTLDevice {
    var maxThreadgroupMemoryLength = 32768
    var maxThreads = 1024
    var width = 32
    var source = ""
    var options = MTLCompileOptions()

    func makeLibrary(source: String, options: MTLCompileOptions?) throws -> any MTLLibrary {
        self.source = source
        self.options = options!
        return Program()
    }
    func makeComputePipelineState(function: any MTLFunction) throws -> any MTLComputePipelineState {
        State(function as! Function, maxThreads, width)
    }
    func makeCommandQueue() -> (any MTLCommandQueue)? { nil }
    func makeBuffer(length: Int, options: MTLResourceOptions) -> (any MTLBuffer)? { Buffer(length) }
}

final class Encoder: MTLComputeCommandEncoder {
    var state: State?
    var buffers: [Int: (length: Int, offset: Int)] = [:]
    var bytes: [Int: [UInt8]] = [:]
    var launches: [[Int]] = []

    func setComputePipelineState(_ state: any MTLComputePipelineState) { self.state = state as? State }
    func setBuffer(_ buffer: (any MTLBuffer)?, offset: Int, index: Int) {
        buffers[index] = (buffer!.length, offset)
    }
    func setBytes(_ bytes: UnsafeRawPointer, length: Int, index: Int) {
        self.bytes[index] = Array(UnsafeRawBufferPointer(start: bytes, count: length))
    }
    func dispatchThreadgroups(_ groups: MTLSize, threadsPerThreadgroup threads: MTLSize) {
        launches.append([groups.width, groups.height, groups.depth, threads.width, threads.height, threads.depth])
    }
    func endEncoding() {}
}

func expect(_ holds: Bool, _ what: String) {
    guard holds else { fatalError("not so: \(what)") }
}

/// The description of the error that `body` throws.
func thrown(_ body: () throws -> Void) -> String {
    do {
        try body()
    } catch {
        return "\(error)"
    }
    return "nothing was thrown"
}

func expectThrown(_ expected: String, _ body: () throws -> Void) {
    let found = thrown(body)
    expect(found.contains(expected), "'\(expected)' in '\(found)'")
}

func little(_ words: [UInt64], _ rest: [UInt32]) -> [UInt8] {
    words.flatMap { word in (0..<8).map { UInt8(truncatingIfNeeded: word >> (8 * $0)) } }
        + rest.flatMap { word in (0..<4).map { UInt8(truncatingIfNeeded: word >> (8 * $0)) } }
}

func elements(_ count: Int, of bytes: Int = 4, offset: Int = 0) -> Flashtile.Buffer {
    Flashtile.Buffer(Buffer(count * bytes + offset), offset: offset)
}

func grid(_ width: Int, _ height: Int = 1, _ depth: Int = 1) -> MTLSize {
    MTLSize(width: width, height: height, depth: depth)
}

// Layouts are checked by this initialiser.
let device = Device()
let library = try Flashtile.Library(device: device, folder: URL(fileURLWithPath: "/kernels"))

// Rows of 128 elements, rotated back.
let hadamard = try Flashtile.HadamardKernel(.hadamard_128, constants: .init(back: true), library: library)
expect(device.source == "/kernels/hadamard_128.metal", "the source is that of the instance: \(device.source)")
expect(device.options.languageVersion == .version3_1, "Metal 3.1")
expect(device.options.mathMode == .safe, "no fast math")
expect(hadamard.threads == 128 && hadamard.instance.traits.d == 128, "threads and generics of the instance")
let state = hadamard.state as! State
expect(state.function.name == "hadamard_128", "the function of the instance")
expect(state.function.constants.values.count == 1, "one constant")
expect(state.function.constants.values[0]!.type == .bool, "a flag")
expect(state.function.constants.values[0]!.bytes == [1], "which is set")

let encoder = Encoder()
var rotated = Flashtile.HadamardKernel.Arguments(
    x: elements(5 * 128, offset: 512), factors: elements(130), out: elements(5 * 128), rows: 5)
try hadamard.encode(rotated, groups: grid(2), into: encoder)
expect(encoder.state === state, "the pipeline is set")
expect(encoder.buffers.count == 3 && encoder.buffers[0]! == (5 * 512 + 512, 512), "x is buffer 0, from its offset on")
expect(encoder.buffers[1]! == (520, 0) && encoder.buffers[2]! == (5 * 512, 0), "factors is buffer 1, out buffer 2")
expect(encoder.bytes == [3: [5, 0, 0, 0]], "rows is copied as buffer 3")
expect(encoder.launches == [[2, 1, 1, 128, 1, 1]], "two threadgroups of 128 threads")

// What does not hold is thrown, and nothing is encoded.
let silent = Encoder()
expectThrown("hadamard: a SIMD group for each row: groups[0]") {
    try hadamard.encode(rotated, groups: grid(1), into: silent)
}
expectThrown("hadamard: the grid has no threadgroup") {
    try hadamard.encode(rotated, groups: grid(2, 0), into: silent)
}
rotated.rows = 6
expectThrown("hadamard: x and out hold the rows") {
    try hadamard.encode(rotated, groups: grid(2), into: silent)
}
rotated.rows = .max
expectThrown("hadamard: x and out hold the rows") {
    try hadamard.encode(rotated, groups: grid(2), into: silent)
}
for offset in [-4, 2, 5 * 512 + 516] {
    rotated.out = Flashtile.Buffer(Buffer(5 * 512), offset: offset)
    expectThrown("the offset of out is \(offset), expected a multiple of 4 up to 2560") {
        try hadamard.encode(rotated, groups: grid(2), into: silent)
    }
}
expect(silent.state == nil && silent.buffers.isEmpty && silent.launches.isEmpty, "nothing is encoded")

// Pipelines that a device does not run.
func make(_ change: (Device) -> Void, threads: Int? = nil) throws {
    let device = Device()
    change(device)
    let library = try Flashtile.Library(device: device, folder: URL(fileURLWithPath: "/kernels"))
    _ = try Flashtile.HadamardKernel(
        .hadamard_128, constants: .init(back: false), library: library, threads: threads)
}
expectThrown("a threadgroup has at most 96 threads on this device, 128 asked for") { try make { $0.maxThreads = 96 } }
expectThrown("SIMD groups have 64 threads on this device") { try make { $0.width = 64 } }
expectThrown("needs 2048 bytes of threadgroup memory, the device has 1024") {
    try make { $0.maxThreadgroupMemoryLength = 1024 }
}
expectThrown("hadamard_128: a threadgroup has 128 threads, 64 asked for") { try make({ _ in }, threads: 64) }

// A structure of parameters, generics and constants in conditions: 3 queries of 2 heads, 4 splits of bf16 rows of 128.
let merge = try Flashtile.MergeKernel(
    .merge_bf16_128_0, constants: .init(hasSinks: true, withLse: false, hasShift: false), library: library)
let constants = (merge.state as! State).function.constants.values
expect([0, 1, 2].map { constants[$0]!.bytes } == [[1], [0], [0]], "constants in their order")
var merged = Flashtile.MergeKernel.Arguments(
    partialOut: elements(6 * 4 * 128), partialMaxSum: elements(6 * 4 * 2), factors: elements(1), sinks: elements(2),
    params: Flashtile.Merge(out: (768, 128, 256), qHeads: 2, queries: 3, splits: 4, simds: 1),
    out: elements(6 * 128, of: 2), lse: elements(0))
let second = Encoder()
try merge.encode(merged, groups: grid(3, 2), into: second)
expect(second.bytes == [4: little([768, 128, 256], [2, 3, 4, 1])], "parameters as Metal reads them")
expect(second.buffers.keys.sorted() == [0, 1, 2, 3, 5, 6], "all other buffers")
expectThrown("merge: a threadgroup for each row") { try merge.encode(merged, groups: grid(2, 3), into: silent) }
merged.sinks = elements(1)
expectThrown("merge: a sink for each head") { try merge.encode(merged, groups: grid(3, 2), into: silent) }
let without = try Flashtile.MergeKernel(
    .merge_bf16_128_0, constants: .init(hasSinks: false, withLse: false, hasShift: false), library: library)
try without.encode(merged, groups: grid(3, 2), into: second)
merged.partialOut = elements(6 * 4 * 128 - 1)
expectThrown("merge: a partial output of every split") {
    try without.encode(merged, groups: grid(3, 2), into: silent)
}
merged.partialOut = elements(6 * 4 * 128)
merged.out = Flashtile.Buffer(Buffer(6 * 256), offset: 1)
expectThrown("the offset of out is 1, expected a multiple of 2") {
    try without.encode(merged, groups: grid(3, 2), into: silent)
}
merged.params.splits = 0
merged.out = elements(6 * 128, of: 2)
expectThrown("merge: there are splits") { try without.encode(merged, groups: grid(3, 2), into: silent) }

let every = Flashtile.HadamardKernel.Instance.allCases.map(\.rawValue)
expect(every == ["hadamard_128"], "the instances that were exported")
print("exported Swift does what its manifest says")
