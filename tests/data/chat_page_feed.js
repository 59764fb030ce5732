// A streamed answer that the test controls: enqueue(bytes)
() => {
  const server = window.fetch
  window.fetch = (path, options) => !options.signal ? server(path, options)
    : Promise.resolve(new Response(new ReadableStream({start(controller) {
      window.enqueue = data => controller.enqueue(new Uint8Array(data))
      options.signal.addEventListener("abort", () => controller.error(options.signal.reason))
    }})))
}
