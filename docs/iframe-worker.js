// Search in pages opened from disk: browsers refuse `new Worker(url)` for file URLs, so the script of the
// search worker runs in a hidden frame. The offline plugin would load such a shim from the network.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.scope = new Promise(resolve => {
        frame.addEventListener("load", () => {
          const scope = frame.contentWindow;
          // The worker answers through its global `postMessage`.
          scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = frame.contentDocument.createElement("script");
          script.src = new URL(url, location);
          script.addEventListener("load", () => resolve(scope));
          frame.contentDocument.body.append(script);
        }, { once: true });
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      const scope = await this.scope;
      scope.dispatchEvent(new scope.MessageEvent("message", { data }));
    }

    terminate() {}
  };
}
